#!/usr/bin/python
"""Configures a container engine to use sublet, by `sublet setup`."""
import json
import os

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: sublet_setup
short_description: Configures a container engine to use sublet
description:
  - Runs C(sublet setup), whose own check says whether anything would change, and whose diff is shown.
  - Nothing is reloaded or restarted; C(message) says what has to be.
author: sublet maintainers
options:
  engine: {description: The engine., required: true, choices: [docker, podman, containerd, crio], type: str}
  default: {description: Whether sublet is the runtime of containers that name none., type: bool, default: false}
  cdi: {description: Whether the engine takes CDI devices., type: bool, default: false}
  state: {description: Whether the engine is to know sublet., choices: [present, absent], type: str, default: present}
  config: {description: The engine's configuration file; the default is its usual place., type: path}
"""
EXAMPLES = r"""
- name: Set Docker up
  sublet_setup: {engine: docker}
"""
RETURN = r"""
message: {description: What sublet said., type: str, returned: always}
"""
PROGRAM = "/usr/bin/sublet"


def arguments(params):
    given = [PROGRAM, "setup", params["engine"]]
    if params["state"] == "absent":
        given.append("--undo")
    else:
        given += ["--" + name for name in ("default", "cdi") if params[name]]
    return given + (["--config", params["config"]] if params["config"] else [])


def is_as_asked(module, command):
    status, out, err = module.run_command(command + ["--check", "--format", "json"])
    try:
        answer = json.loads(out)
        if answer["schema"] == "sublet.setup/1" and status in (0, 1):
            return answer["as_asked"]
    except (ValueError, KeyError, TypeError):
        pass
    module.fail_json(msg=err.strip() or "sublet setup --check gave no answer", rc=status)


def main():
    module = AnsibleModule(
        argument_spec={
            "engine": {"required": True, "choices": ["docker", "podman", "containerd", "crio"]},
            "default": {"type": "bool", "default": False},
            "cdi": {"type": "bool", "default": False},
            "state": {"choices": ["present", "absent"], "default": "present"},
            "config": {"type": "path"},
        },
        supports_check_mode=True,
    )
    if module.check_mode and not os.path.exists(PROGRAM):
        module.exit_json(changed=module.params["state"] == "present", message="sublet is not installed yet")
    command = arguments(module.params)
    if is_as_asked(module, command):
        module.exit_json(changed=False, message="as asked")
    status, diff, notes = module.run_command(command + ["--dry-run"], check_rc=True)
    message = notes
    if not module.check_mode:
        status, message, notes = module.run_command(command, check_rc=True)
    module.exit_json(changed=True, message=message.strip(), diff={"prepared": diff})


if __name__ == "__main__":
    main()
