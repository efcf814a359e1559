#!/usr/bin/python
"""Writes files below /etc/sublet that `sublet config check` has found to be in order together."""
import os
import re
import shutil
import tempfile

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: sublet_config
short_description: Writes sublet's configuration files
description:
  - The files that are on the host, with these in place of those of the same names, are checked by
    C(sublet config check --etc) in another directory. Only if they are in order together are any written.
  - Check mode checks them, too.
author: sublet maintainers
options:
  files:
    description: >-
      Name below /etc/sublet (C(config.toml), C(containers.toml), C(conf.d/NAME.toml), a layout such as C(mig.toml)), and text.
      A file without text is removed.
    type: dict
    required: true
"""
EXAMPLES = r"""
- name: Write the shares
  sublet_config:
    files:
      conf.d/50-shares.toml: |
        [share.small]
        sm = 25
        memory = "8GiB"
"""
RETURN = r"""
files: {description: The files that were written or removed., type: list, returned: always}
"""
PROGRAM = "/usr/bin/sublet"
ETC = "/etc/sublet"
NAME = re.compile(r"(conf\.d/)?[A-Za-z0-9_][A-Za-z0-9_.-]*\.(toml|ya?ml)")


def wanted(module):
    files = {}
    for name, text in module.params["files"].items():
        if not NAME.fullmatch(name):
            module.fail_json(msg="%s: expected NAME.toml, NAME.yaml or conf.d/NAME.toml" % name)
        if text is not None and not isinstance(text, str):
            module.fail_json(msg="%s: expected the file's text" % name)
        files[name] = text if text is None or text.endswith("\n") else text + "\n"
    return files


def found(name):
    try:
        with open(os.path.join(ETC, name), encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except FileNotFoundError:
        return None


def put(directory, name, text):
    path = os.path.join(directory, name)
    if text is None:
        if os.path.lexists(path):
            os.remove(path)
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle, new = tempfile.mkstemp(prefix=".", dir=os.path.dirname(path))
    with open(handle, "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), 0o644)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def check(module, files):
    """Fails if the files would not be in order together with those on the host."""
    staged = os.path.join(module.tmpdir, "etc")
    if os.path.isdir(ETC):
        shutil.copytree(ETC, staged, ignore_dangling_symlinks=True)
    else:
        os.mkdir(staged)
    for name, text in files.items():
        put(staged, name, text)
    status, out, err = module.run_command([PROGRAM, "config", "check", "--etc", staged])
    shutil.rmtree(staged)
    said = err.replace(staged, ETC).strip()
    if status != 0:
        module.fail_json(msg="nothing was written: " + said, rc=status)
    for line in said.splitlines():
        module.warn(line)


def main():
    module = AnsibleModule(argument_spec={"files": {"type": "dict", "required": True}}, supports_check_mode=True)
    os.umask(0o022)
    files = wanted(module)
    changed = {name: text for name, text in files.items() if found(name) != text}
    if os.path.exists(PROGRAM):
        check(module, files)
    elif module.check_mode:
        module.warn("sublet is not installed yet, so its configuration is not checked")
    else:
        module.fail_json(msg=PROGRAM + " is missing: install sublet first")
    diff = [
        {"before_header": os.path.join(ETC, name), "after_header": os.path.join(ETC, name), "before": found(name) or "",
         "after": text or ""}
        for name, text in changed.items()
    ]
    if not module.check_mode:
        for name, text in changed.items():
            put(ETC, name, text)
    module.exit_json(changed=bool(changed), files=sorted(changed), diff=diff)


if __name__ == "__main__":
    main()
