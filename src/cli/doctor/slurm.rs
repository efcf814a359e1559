//! Slurm: whether sublet bounds its jobs on this node, and whether it counts the GPUs that there are.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Host, Outcome, fail, pass, skip, version, warn};
use sublet_core::text::safe;

/// Where slurmd has its configuration; the second is that of a node which gets it from slurmctld.
const FILES: [&str; 2] = ["/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf"];

/// Keys of slurm.conf, and the programs that they run.
const PROGRAMS: [(&str, &str); 3] =
    [("Prolog", "prolog"), ("TaskProlog", "task-prolog"), ("Epilog", "epilog")];

/// The directory of the programs that the package has for Slurm.
const SHIPPED: &str = "/usr/libexec/sublet/slurm";

/// The first version that was seen to give a job with whole GPUs none that has shards.
const KEEPS_APART: [u32; 2] = [24, 11];

/// Checks slurmctld's settings of this node and of its jobs.
pub(super) fn jobs(host: &Host<'_>) -> Outcome {
    if host.program("slurmd").is_none() && !FILES.iter().any(|file| host.at(file).is_file()) {
        return skip("not installed");
    }
    let Some(config) = (host.ask)(&["scontrol", "show", "config"]) else {
        return warn("slurmctld could not be asked how it runs jobs")
            .fix("run `scontrol show config`, and do what it says");
    };
    let Some(node) = node(host) else { return skip("Slurm has no node on this host") };
    let problems = match programs(host, &config) {
        Ok(problems) => [problems, limits(&config), gres(host, &node), unused(&node)].concat(),
        Err(unbounded) => vec![unbounded],
    };
    let joined = |Outcome(one, found, fix), Outcome(other, also, more)| {
        let fix = [fix, more].into_iter().flatten().collect::<Vec<String>>().join("; ");
        Outcome(one.max(other), format!("{found}; {also}"), Some(fix))
    };
    problems.into_iter().reduce(joined).unwrap_or_else(|| pass(found(&config, &node)))
}

/// slurmctld's description of this node.
fn node(host: &Host<'_>) -> Option<String> {
    let name = host.text("/proc/sys/kernel/hostname")?;
    let short = name.trim().split('.').next()?;
    // A node may have another name than its host.
    let names = (host.ask)(&["scontrol", "show", "aliases", short])?;
    (host.ask)(&["scontrol", "show", "node", names.split([' ', ',', '\n']).next()?])
}

/// The values of a key of `scontrol show config`, which lists several as `Prolog[0] = …`.
fn values<'c>(config: &'c str, key: &str) -> Vec<&'c str> {
    let lines = config.lines().filter_map(|line| line.split_once('='));
    let of_key = lines.filter(|(name, _)| name.trim().split('[').next() == Some(key));
    of_key.map(|(_, value)| value.trim()).filter(|value| !["", "(null)"].contains(value)).collect()
}

/// Whether slurmd runs sublet's programs. `Err`: none of them, as where a site does not use sublet for its jobs.
fn programs(host: &Host<'_>, config: &str) -> Result<Vec<Outcome>, Outcome> {
    let all = PROGRAMS.map(|(key, name)| runs(host, &values(config, key), key, name));
    if !all.iter().any(|(is_sublets, _)| *is_sublets) {
        let found = "as far as can be seen, Slurm's Prolog, TaskProlog and Epilog do not run sublet's, which then \
                     knows nothing of the GPUs that jobs have";
        return Err(warn(found).fix("put the lines of `sublet slurm gres` into slurm.conf and gres.conf"));
    }
    Ok(all.into_iter().filter_map(|(_, problem)| problem).collect())
}

/// Whether `key` of slurm.conf, of these `values`, is meant to run sublet's program `name`, and why it does not.
fn runs(host: &Host<'_>, values: &[&str], key: &str, name: &str) -> (bool, Option<Outcome>) {
    let shipped = format!("{SHIPPED}/{name}");
    let files = |value: &str| listed(&host.at(value)).unwrap_or_else(|| vec![host.at(value)]);
    let calls = |file: &PathBuf| {
        let text = fs::read(file).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text.is_ok_and(|text| text.contains(&shipped) || text.contains(&format!("sublet slurm {name}")))
    };
    let is_glob = |value: &str| value.contains(['*', '?', '[']);
    if values.iter().any(|value| files(value).iter().any(calls)) {
        return (true, None);
    }
    let missing = values.iter().find(|value| !is_glob(value) && !host.at(value).exists());
    let problem = match (missing, values.first()) {
        (Some(file), _) => fail(format!("Slurm's {key}, {}, is not on this node", safe(file)))
            .fix("install the package sublet, or correct slurm.conf"),
        (None, Some(program)) => {
            warn(format!("it cannot be seen whether Slurm's {key}, {}, runs sublet's", safe(program)))
                .fix(format!("let it run {shipped}"))
        }
        (None, None) => fail(format!("slurm.conf has no {key}"))
            .fix(format!("{key}={shipped} in slurm.conf, then `scontrol reconfigure`")),
    };
    (missing.is_some(), Some(problem))
}

/// The files that `pattern` stands for, if it is `DIRECTORY/*`.
fn listed(pattern: &Path) -> Option<Vec<PathBuf>> {
    let dir = pattern.parent().filter(|_| pattern.ends_with("*"))?;
    Some(fs::read_dir(dir).ok()?.filter_map(Result::ok).map(|entry| entry.path()).collect())
}

/// Checks the settings that keep jobs' processes apart.
fn limits(config: &str) -> Vec<Outcome> {
    let value =
        |key: &str| values(config, key).first().map(|value| value.to_ascii_lowercase()).unwrap_or_default();
    let has = |key: &str, word: &str| value(key).split(',').any(|own| own == word);
    let mut found = Vec::new();
    if value("ProctrackType") != "proctrack/cgroup" {
        let why = "jobs have no cgroups by which sublet knows them, so their tasks are refused";
        found.push(fail(why).fix("ProctrackType=proctrack/cgroup in slurm.conf"));
    }
    if !has("PrologFlags", "alloc") || !has("PrologFlags", "contain") {
        let why =
            "the Prolog does not run before a job's first step, or a job has no cgroup between its steps";
        found.push(warn(why).fix("PrologFlags=Alloc,Contain in slurm.conf"));
    }
    let lines = [
        (has("TaskPlugin", "task/cgroup"), "TaskPlugin=task/cgroup in slurm.conf"),
        (value("ConstrainDevices") == "yes", "ConstrainDevices=yes in cgroup.conf"),
    ];
    let missing: Vec<&str> =
        lines.iter().filter_map(|(is_there, line)| (!is_there).then_some(*line)).collect();
    if !missing.is_empty() {
        found.push(warn("every job may open every GPU").fix(missing.join(", ")));
    }
    found
}

/// How many of a kind of GRES a node has: `Gres=gpu:h200:4(S:0-1),shard:32`.
fn count(node: &str, kind: &str) -> Option<u64> {
    let gres = node.split_whitespace().find_map(|word| word.strip_prefix("Gres="))?;
    // Without the parts in parentheses.
    let plain: String = gres.split('(').map(|part| part.rsplit(')').next().unwrap_or_default()).collect();
    let of_kind = plain.split(',').filter(|part| part.split(':').next() == Some(kind));
    let count = |part: &str| part.rsplit(':').next().and_then(|many| many.parse().ok()).unwrap_or(1);
    of_kind.map(count).reduce(|all, more| all + more)
}

/// Whether Slurm counts the GPUs of this host, and their parts as sublet does.
fn gres(host: &Host<'_>, node: &str) -> Vec<Outcome> {
    let lines = |unit: &str| {
        format!("correct slurm.conf and gres.conf: `sublet slurm gres --unit {unit}` prints the lines")
    };
    let Ok(inventory) = &host.inventory else { return Vec::new() };
    let gpus = match crate::slurm::in_order(inventory) {
        Ok(gpus) => gpus.len() as u64,
        Err(error) => return vec![warn(error).fix("nvidia-smi -i GPU -mig 0, or another gres.conf")],
    };
    let [counted, shards, mps] = ["gpu", "shard", "mps"].map(|kind| count(node, kind));
    let mut found = Vec::new();
    let counted = counted.unwrap_or(0);
    if counted != gpus {
        let text = format!("Slurm counts {counted} GPUs on this node, and there are {gpus}");
        found.push(fail(text).fix(lines(if mps.is_some() { "mps" } else { "shard" })));
    }
    if shards.is_some() && mps.is_some() {
        let text =
            "the node has shards and mps: Slurm then chooses no GPU for jobs with mps, and they are refused";
        found.push(fail(text).fix("leave one of them out of slurm.conf and gres.conf"));
        return found;
    }
    let each = u64::from(host.config.slurm.shards);
    for (many, each, unit, whence) in [(shards, each, "shard", " ([slurm] shards)"), (mps, 100, "mps", "")] {
        let Some(many) = many.filter(|many| *many != each * counted) else { continue };
        let text = format!("Slurm counts {many} {unit} on {counted} GPUs, and sublet {each} on each{whence}");
        found.push(warn(text).fix(lines(unit)));
    }
    found
}

/// Slurm's reason not to use the node.
fn unused(node: &str) -> Vec<Outcome> {
    let line = |key: &str| node.lines().find_map(|line| line.trim().strip_prefix(key));
    let state = line("State=").and_then(|state| state.split_whitespace().next()).unwrap_or_default();
    if !["DRAIN", "DOWN", "INVAL", "FAIL"].iter().any(|word| state.contains(word)) {
        return Vec::new();
    }
    let reason = line("Reason=").unwrap_or("no reason is given");
    let fix = "remove the reason, then `scontrol update NodeName=NODE State=RESUME`";
    vec![warn(format!("Slurm starts no job here: {}: {}", safe(state), safe(reason))).fix(fix)]
}

fn found(config: &str, node: &str) -> String {
    let words = values(config, "SLURM_VERSION").first().copied().unwrap_or_default();
    let gres = node.split_whitespace().find_map(|word| word.strip_prefix("Gres=")).unwrap_or_default();
    let mut found = format!("{}, {}", safe(words), safe(gres));
    if version(words).is_some_and(|version| version[..] < KEEPS_APART[..]) && count(node, "gpu") > Some(0) {
        found += "; Slurm 22.05 gives jobs with gpu:1 a GPU that has shards or mps, and sublet refuses them: submit whole \
                  GPUs to other nodes, or use Slurm 24.11";
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Warn};
    use super::super::fake_host::{Fake, finding, passed, skipped};
    use super::*;
    use sublet_core::place::fixture::{device, host as gpus};

    const NEW: [&str; 2] =
        [include_str!("slurm_samples/config-24.11.txt"), include_str!("slurm_samples/node-24.11.txt")];
    const OLD: [&str; 2] =
        [include_str!("slurm_samples/config-22.05.txt"), include_str!("slurm_samples/node-22.05.txt")];

    const PROLOG: &str = "/usr/libexec/sublet/slurm/prolog";
    const PLUGIN: &str = "TaskPlugin              = task/cgroup";
    const OPEN: &str = "ConstrainDevices        = ";

    /// The answer of scontrol, with `from` replaced by `to`.
    fn answer(argv: &[&str], [config, node]: [&str; 2], from: &str, to: &str) -> Option<String> {
        let text = match argv {
            ["scontrol", "show", "config"] => config,
            ["scontrol", "show", "aliases", "gpu7"] => "n1\n",
            ["scontrol", "show", "node", "n1"] => node,
            _ => return None,
        };
        assert!([config, node].concat().contains(from), "{from}");
        Some(text.replace(from, to))
    }

    fn none(argv: &[&str]) -> Option<String> {
        answer(argv, NEW, "= /usr/libexec/sublet/slurm/", "= (null)\nx = ")
    }

    /// A host with four GPUs, four shards each, and the programs that the package has.
    fn fake() -> Fake {
        let mut fake = Fake::new();
        fake.config.slurm.shards = 4;
        fake.file("/etc/slurm/slurm.conf", "").file("/proc/sys/kernel/hostname", "gpu7.example.org\n");
        for (_, name) in PROGRAMS {
            fake.file(
                &format!("{SHIPPED}/{name}"),
                &format!("#!/bin/sh\nexec /usr/bin/sublet slurm {name}\n"),
            );
        }
        fake
    }

    fn with(fake: &Fake, ask: fn(&[&str]) -> Option<String>) -> Outcome {
        let inventory = Ok(gpus((0..4).map(device).collect()));
        jobs(&Host { ask, inventory, ..fake.host() })
    }

    /// The outcome when Slurm 24.11 says `$to` in place of `$from`.
    macro_rules! changed {
        ($fake:expr, $from:expr, $to:expr) => {
            with($fake, |argv| answer(argv, NEW, $from, $to))
        };
    }

    #[test]
    fn a_node_as_sublet_describes_it_passes_with_both_versions() {
        let fake = fake();
        assert_eq!(passed(changed!(&fake, "", "")), "24.11.5, gpu:4,shard:16");
        let found = passed(with(&fake, |argv| answer(argv, OLD, "", "")));
        assert!(found.starts_with("22.05.8, gpu:4,shard:16; Slurm 22.05 gives jobs with gpu:1"), "{found}");
        assert_eq!(
            passed(changed!(&fake, "gpu:4,shard:16", "gpu:h200:4(S:0-1),shard:16")),
            "24.11.5, gpu:h200:4(S:0-1),shard:16"
        );
    }

    #[test]
    fn without_slurm_the_check_is_skipped_and_without_an_answer_it_warns() {
        assert_eq!(skipped(jobs(&Fake::new().host())), "not installed");
        let fake = fake();
        let mute = finding(with(&fake, |_| None), Warn);
        assert!(mute.0.contains("could not be asked"), "{mute:?}");
        let login = with(&fake, |argv| answer(argv, NEW, "", "").filter(|_| argv[2] == "config"));
        assert_eq!(skipped(login), "Slurm has no node on this host");
    }

    #[test]
    fn programs_that_are_not_sublets_are_reported() {
        let fake = fake();
        let text = |outcome, verdict| finding(outcome, verdict).0;
        assert_eq!(
            text(
                changed!(
                    &fake,
                    "TaskProlog              = /usr/libexec/sublet/slurm/task-prolog",
                    "TaskProlog = (null)"
                ),
                Fail
            ),
            "slurm.conf has no TaskProlog"
        );
        assert!(
            text(changed!(&fake, PROLOG, "/etc/x"), Fail).contains("Prolog, /etc/x, is not on this node")
        );
        fake.file("/etc/x", "#!/bin/sh\nlogger hello\n")
            .file("/etc/p.d/10", "")
            .file("/etc/p.d/20", "sublet slurm prolog\n");
        assert!(
            text(changed!(&fake, PROLOG, "/etc/x"), Warn)
                .contains("cannot be seen whether Slurm's Prolog, /etc/x,")
        );
        passed(changed!(&fake, PROLOG, "/etc/p.d/*"));
        passed(changed!(&fake, "Prolog[0]               = /usr", "Prolog[0] = /etc/x\nProlog[1] = /usr"));
        let (found, fix) = finding(changed!(&fake, "/usr/libexec/sublet/slurm/", "/etc/p.d/1"), Fail);
        assert!(found.contains("/etc/p.d/1epilog, is not on this node"), "{found}");
        assert!(fix.contains("install the package"), "{fix}");
        assert!(text(with(&fake, none), Warn).contains("do not run sublet's"));
    }

    #[test]
    fn jobs_that_are_not_kept_apart_are_reported() {
        let fake = fake();
        assert!(
            finding(changed!(&fake, "Alloc,Contain", "Alloc"), Warn)
                .1
                .starts_with("PrologFlags=Alloc,Contain")
        );
        assert!(
            finding(changed!(&fake, "proctrack/cgroup", "proctrack/linuxproc"), Fail)
                .0
                .contains("tasks are refused")
        );
        assert!(
            finding(changed!(&fake, OPEN, "ConstrainDevices = no"), Warn).0.contains("may open every GPU")
        );
        let (found, fix) = finding(changed!(&fake, PLUGIN, "TaskPlugin = task/affinity"), Warn);
        assert_eq!(
            (&*found, &*fix),
            ("every job may open every GPU", "TaskPlugin=task/cgroup in slurm.conf")
        );
        passed(changed!(&fake, PLUGIN, "TaskPlugin = task/affinity,task/cgroup"));
        let down = finding(
            changed!(&fake, "State=IDLE", "State=IDLE+DRAIN Reason=x\n   Reason=Prolog error [root@now]\n"),
            Warn,
        );
        assert!(down.0.contains("IDLE+DRAIN: Prolog error"), "{down:?}");
    }

    #[test]
    fn gres_that_disagree_with_the_gpus_are_reported() {
        let fake = fake();
        let (found, fix) = finding(changed!(&fake, "Gres=gpu:4,shard:16", "Gres=gpu:8,shard:32"), Fail);
        assert_eq!(found, "Slurm counts 8 GPUs on this node, and there are 4");
        assert!(fix.contains("`sublet slurm gres --unit shard`"), "{fix}");
        let (found, _) = finding(changed!(&fake, "shard:16", "shard:32"), Warn);
        assert_eq!(found, "Slurm counts 32 shard on 4 GPUs, and sublet 4 on each ([slurm] shards)");
        assert!(finding(changed!(&fake, "shard:16", "mps:200"), Warn).1.contains("--unit mps"));
        passed(changed!(&fake, "shard:16", "mps:400"));
        let (found, _) = finding(changed!(&fake, "shard:16", "shard:8,mps:200"), Fail);
        assert!(found.contains("has shards and mps"), "{found}");
        passed(changed!(&fake, "Gres=gpu:4,shard:16", "Gres=gpu:4,fpga:2"));
        let (found, fix) = finding(changed!(&fake, "Gres=gpu:4,shard:16", "Gres=gpu:3,shard:16"), Fail);
        assert!(found.contains("; Slurm counts 16 shard on 3 GPUs") && fix.contains("; "), "{found} {fix}");
    }
}
