//! The program under the filter of system calls of its systemd unit: a call that the unit forbids ends it.
//!
//! The sets of calls are those of systemd 252 (`systemd-analyze syscall-filter @resources`), for x86-64.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use libc::sock_filter;

use crate::process::Process;

const UNIT: &str = include_str!("../../deploy/systemd/quire.service");

/// Calls by name, without the prefix.
type Calls = [(&'static str, i64)];

macro_rules! calls {
    ($($call:ident),* $(,)?) => { &[$((stringify!($call), libc::$call)),*] };
}

/// Calls that are not in `@system-service`.
const NO_SERVICE: &Calls = calls![
    SYS__sysctl,
    SYS_acct,
    SYS_adjtimex,
    SYS_afs_syscall,
    SYS_bpf,
    SYS_chroot,
    SYS_clock_adjtime,
    SYS_clock_settime,
    SYS_delete_module,
    SYS_fanotify_init,
    SYS_fanotify_mark,
    SYS_finit_module,
    SYS_fsconfig,
    SYS_fsmount,
    SYS_fsopen,
    SYS_fspick,
    SYS_getpmsg,
    SYS_init_module,
    SYS_ioperm,
    SYS_iopl,
    SYS_kexec_file_load,
    SYS_kexec_load,
    SYS_landlock_add_rule,
    SYS_landlock_create_ruleset,
    SYS_landlock_restrict_self,
    SYS_lookup_dcookie,
    SYS_memfd_secret,
    SYS_mincore,
    SYS_modify_ldt,
    SYS_mount,
    SYS_mount_setattr,
    SYS_move_mount,
    SYS_mseal,
    SYS_nfsservctl,
    SYS_open_by_handle_at,
    SYS_open_tree,
    SYS_perf_event_open,
    SYS_pidfd_getfd,
    SYS_pivot_root,
    SYS_pkey_alloc,
    SYS_pkey_free,
    SYS_pkey_mprotect,
    SYS_process_mrelease,
    SYS_ptrace,
    SYS_putpmsg,
    SYS_quotactl,
    SYS_quotactl_fd,
    SYS_reboot,
    SYS_seccomp,
    SYS_security,
    SYS_setdomainname,
    SYS_sethostname,
    SYS_settimeofday,
    SYS_swapoff,
    SYS_swapon,
    SYS_sysfs,
    SYS_syslog,
    SYS_tuxcall,
    SYS_umount2,
    SYS_uselib,
    SYS_ustat,
    SYS_vhangup,
    SYS_vserver,
];

/// Calls of `@privileged` that are in `@system-service`.
const PRIVILEGED: &Calls = calls![
    SYS_capset,
    SYS_chown,
    SYS_fchown,
    SYS_fchownat,
    SYS_lchown,
    SYS_setfsuid,
    SYS_setgroups,
    SYS_setresuid,
    SYS_setreuid,
    SYS_setuid,
];

/// Calls of `@resources`.
const RESOURCES: &Calls = calls![
    SYS_ioprio_set,
    SYS_mbind,
    SYS_migrate_pages,
    SYS_move_pages,
    SYS_sched_setaffinity,
    SYS_sched_setattr,
    SYS_sched_setparam,
    SYS_sched_setscheduler,
    SYS_set_mempolicy,
    SYS_set_mempolicy_home_node,
    SYS_setpriority,
    SYS_setrlimit,
];

/// The last call that the sets know of. No set has later ones.
const LAST: i64 = libc::SYS_mseal;

/// `AUDIT_ARCH_X86_64`.
const ARCHITECTURE: u32 = 0xc000_003e;

/// What the unit forbids: its `SystemCallFilter` lines, one after the other.
fn forbidden() -> BTreeMap<&'static str, i64> {
    let mut forbidden = BTreeMap::new();
    let lines: Vec<&str> = UNIT.lines().filter_map(|line| line.strip_prefix("SystemCallFilter=")).collect();
    assert_eq!(lines[0], "@system-service");
    forbidden.extend(NO_SERVICE.iter().copied());
    for line in &lines[1..] {
        for word in line.trim_start_matches('~').split(' ') {
            let set = match word {
                "@privileged" => PRIVILEGED,
                "@resources" => RESOURCES,
                call => RESOURCES
                    .iter()
                    .find(|(name, _)| name.trim_start_matches("SYS_") == call)
                    .map(std::slice::from_ref)
                    .unwrap(),
            };
            if line.starts_with('~') {
                forbidden.extend(set.iter().copied());
            } else {
                forbidden.retain(|name, _| set.iter().all(|(allowed, _)| allowed != name));
            }
        }
    }
    forbidden
}

/// A filter that ends the process at one of these calls.
fn filter(forbidden: impl IntoIterator<Item = i64>) -> Vec<sock_filter> {
    let step = |code: u32, k: u32, jt: u8, jf: u8| sock_filter { code: code as u16, jt, jf, k };
    let load = |offset: u32| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset, 0, 0);
    let end = |action: u32| step(libc::BPF_RET | libc::BPF_K, action, 0, 0);
    let kill = end(libc::SECCOMP_RET_KILL_PROCESS);
    let jump = |test: u32, k: u32, jt: u8, jf: u8| step(libc::BPF_JMP | test | libc::BPF_K, k, jt, jf);
    // The architecture, then the number of the call.
    let mut filter = vec![load(4), jump(libc::BPF_JEQ, ARCHITECTURE, 1, 0), kill, load(0)];
    filter.extend([jump(libc::BPF_JGT, LAST as u32, 0, 1), kill]);
    for call in forbidden {
        filter.extend([jump(libc::BPF_JEQ, call as u32, 0, 1), kill]);
    }
    filter.push(end(libc::SECCOMP_RET_ALLOW));
    filter
}

/// Puts `filter` around the program that `command` starts.
fn confine(command: &mut Command, mut filter: Vec<sock_filter>) {
    let install = move || {
        let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
        let mode = libc::SECCOMP_MODE_FILTER;
        // SAFETY: `program` describes `filter`, which outlives the calls; nothing is written.
        let failed = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
                || libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    };
    // SAFETY: between fork and exec `install` makes two system calls, and it allocates nothing.
    unsafe { command.pre_exec(install) };
}

#[test]
fn the_program_serves_under_the_filter_of_its_unit() {
    // Threads on every core: only then do workers keep to theirs.
    let confined = |forbidden: Vec<i64>| Process::start_with(&[], |command| confine(command, filter(forbidden)));
    let server = confined(forbidden().into_values().collect());
    assert_eq!(server.send("POST /v1/completions HTTP/1.1", r#"{"prompt": "One", "max_tokens": 8}"#).status, 200);
    assert_eq!(server.send("GET /metrics HTTP/1.1", "").status, 200);
    server.stop();
}

#[test]
fn the_filter_of_the_test_ends_a_program_that_makes_a_forbidden_call() {
    use std::os::unix::process::ExitStatusExt;
    let run = |forbidden: Vec<i64>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_quire"));
        confine(command.arg("--version"), filter(forbidden));
        command.output().unwrap().status
    };
    assert!(run(vec![libc::SYS_mount]).success());
    assert_eq!(run(vec![libc::SYS_mount, libc::SYS_write]).signal(), Some(libc::SIGSYS));
    assert!(forbidden().contains_key("SYS_mount") && !forbidden().contains_key("SYS_sched_setaffinity"));
}
