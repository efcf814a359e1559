#!/usr/bin/python
"""Cuts a host's GPUs as a MIG layout says, by `sublet mig plan` and `sublet mig apply`."""
import json
import os

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: sublet_mig
short_description: Cuts GPUs as a MIG layout says
description:
  - Instances in use stay where they are; if that is not possible, or a GPU cannot have the layout, nothing is changed.
author: sublet maintainers
options:
  layout: {description: The layout, in TOML., type: str, required: true}
  allow_reset: {description: Whether a GPU may be reset if its MIG mode changes., type: bool, default: false}
"""
EXAMPLES = r"""
- name: Cut all GPUs in four
  sublet_mig:
    layout: |
      [[gpu]]
      match = "all"
      mig = true
      instances = [{ profile = "1g.18gb", count = 4 }]
"""
RETURN = r"""
steps: {description: What is done, or would be., type: list, returned: always}
"""
PROGRAM = "/usr/bin/sublet"


def main():
    module = AnsibleModule(
        argument_spec={
            "layout": {"required": True},
            "allow_reset": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    if module.check_mode and not os.path.exists(PROGRAM):
        module.exit_json(changed=True, steps=[], msg="sublet is not installed yet, so nothing can be planned")
    path = os.path.join(module.tmpdir, "layout.toml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(module.params["layout"])
    status, out, err = module.run_command([PROGRAM, "mig", "plan", path, "--format", "json"])
    try:
        plans = json.loads(out)
    except ValueError:
        module.fail_json(msg=err.strip() or "sublet mig plan gave no answer", rc=status)
    obstacles = [plan["obstacle"] for plan in plans if plan["obstacle"]]
    if obstacles:
        module.fail_json(msg="; ".join(obstacles))
    if any(plan["reset"] for plan in plans) and not module.params["allow_reset"]:
        module.fail_json(msg="a GPU would have to be reset: allow_reset")
    steps = ["%s: %s" % (plan["gpu"], step) for plan in plans for step in plan["steps"]]
    if steps and not module.check_mode:
        reset = ["--allow-reset"] if module.params["allow_reset"] else []
        status, out, err = module.run_command([PROGRAM, "mig", "apply", path] + reset)
        if status != 0:
            module.fail_json(msg=err.strip(), rc=status)
    diff = {"prepared": "".join(step + "\n" for step in steps)}
    module.exit_json(changed=bool(steps), steps=steps, diff=diff)


if __name__ == "__main__":
    main()
