//! A kernel that lacks system calls: each is hidden by a seccomp filter, which answers ENOSYS as an old kernel does.
#![allow(unsafe_code, reason = "the filter is installed between fork and exec")]

use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::libc;
use sublet_e2e::{Engine, World, skip_unless_root};

const HOLD: &[&str] = &["/bin/sleep", "60"];

/// `env`, which runs its arguments on a kernel without `call`.
fn without(call: libc::c_long) -> Command {
    let mut command = Command::new("env");
    let code = |bits: u32| u16::try_from(bits).expect("16 bits");
    let number = u32::try_from(call).expect("a number");
    let hidden = libc::SECCOMP_RET_ERRNO | u32::try_from(libc::ENOSYS).expect("a number");
    let step = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // The number of the call comes first in seccomp_data (seccomp(2)).
    let mut filter = [
        step(code(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS), 0, 0),
        step(code(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K), 1, number),
        step(code(libc::BPF_RET | libc::BPF_K), 0, hidden),
        step(code(libc::BPF_RET | libc::BPF_K), 0, libc::SECCOMP_RET_ALLOW),
    ];
    let install = move || {
        let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
        // SAFETY: `program` and the filter that it points to live until the call returns, which copies them.
        let answer =
            unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
        if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(install) };
    command
}

#[test]
fn what_an_old_kernel_lacks_is_named_and_plain_containers_start() {
    if skip_unless_root() {
        return;
    }
    let calls = [
        ("openat2", libc::SYS_openat2, true),
        ("pidfd_open", libc::SYS_pidfd_open, true),
        ("close_range", libc::SYS_close_range, false),
    ];
    for (name, call, needed) in calls {
        let world = World::simulated("h200", "");
        let plain = world.bundle("plain", &[], HOLD);
        let created = plain.create_by(without(call));
        assert!(created.ok, "{name}: {}", created.stderr);
        assert!(plain.start().ok, "{name}");
        plain.down();
        let mut doctor = without(call);
        doctor.arg(world.command("sublet").get_program()).args(["doctor", "--quick"]);
        let doctor = doctor.env("SUBLET_CONFIG", &world.config).output().expect("doctor runs");
        let said = String::from_utf8_lossy(&doctor.stdout).into_owned();
        let line = said.lines().find(|line| line.contains(&format!("this kernel has no {name}")));
        assert_eq!(line.is_some_and(|line| line.contains("Linux 5.6")), needed, "{name}: {said}");
        let share = world.bundle("share", &[("sublet.sm", "25")], HOLD);
        let created = share.create_by(without(call));
        if created.ok {
            // Where the call is not needed to start a container.
            assert!(name != "openat2", "{name}");
            assert!(share.start().ok, "{name}");
            share.down();
        } else {
            assert!(
                needed && created.stderr.contains("sublet needs Linux 5.6 or later"),
                "{name}: {}",
                created.stderr
            );
        }
        world.assert_empty();
    }
}

#[test]
fn a_hook_at_prestart_names_the_kernel_that_it_needs() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let mut bundle = world.bundle("late", &[("sublet.sm", "25")], HOLD);
    bundle.hook(&["prestart", "poststop"]);
    let created = bundle.create_by(without(libc::SYS_mount_setattr));
    let last = String::from_utf8(world.sublet(&["status", "--last-error"]).stdout).expect("UTF-8");
    // crun does not show what hooks print.
    let said = if world.engine == Engine::Runc { &created.stderr } else { &last };
    assert!(!created.ok && said.contains("the prestart hook needs Linux 5.12"), "{created:?}, {last}");
    let _ = bundle.delete();
    world.assert_empty();
}
