//! `sublet slurm`: this node's lines of gres.conf, and what Slurm runs before and after a job and before each task.

use std::io::Write as _;
use std::process::{Command as Program, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::slurm::{self, Allocation, Unit};
use sublet_core::admit::{JobError, Local, fresh_inventory, is_remote};
use sublet_core::broker::client::{Broker, BrokerError};
use sublet_core::broker::protocol::{Answer, Ask, JobEnvironment};
use sublet_core::config::Config;
use sublet_core::names::replace_ids;
use sublet_core::process::child::{self, ChildError};
use sublet_core::slurm::{JobCgroup, JobRecord, JobShare, make_directory, remove_stray_directories};
use sublet_core::text::safe;

/// The longest time that `scontrol` may take. slurmctld answers in milliseconds, or not at all.
const SCONTROL: Duration = Duration::from_secs(10);

/// How long a task's share is asked for while it is refused for what may change, and the pause between two times.
const SETTLING: Duration = Duration::from_secs(3);
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// The age of records whose jobs are looked after: records of running jobs mostly have processes by then.
const FORGOTTEN: Duration = Duration::from_secs(60 * 60);

/// How many jobs one epilog asks slurmctld for.
const MOST_ASKED: usize = 4;

/// States in which a job has ended for good (squeue(1)).
const ENDED: [&str; 9] = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
];

/// Subcommands of `sublet slurm`.
#[derive(Debug, clap::Subcommand)]
pub enum Command {
    /// Print this node's lines for gres.conf and slurm.conf
    Gres {
        /// What the parts of a GPU are counted in
        #[arg(long, value_enum, default_value = "shard")]
        unit: Unit,
        /// The node's name in Slurm; default: the host's name up to the first dot
        #[arg(long)]
        node: Option<String>,
    },
    /// Note what a job got: the prolog in slurm.conf. Exit code 0 whatever happens, because Slurm drains the node after
    /// any other
    Prolog,
    /// Print the environment of a job's task: the task prolog in slurm.conf. Exit code 1 if there is no room: the task fails
    TaskProlog,
    /// Free what a job held: the epilog in slurm.conf. Exit code 0 whatever happens
    Epilog,
}

/// Runs it.
///
/// # Errors
/// `gres`: this node's GPUs cannot be written as lines. `task-prolog`: the job's share is not to be had.
pub fn run(command: &Command, config: &Config) -> anyhow::Result<ExitCode> {
    match command {
        Command::Gres { unit, node } => {
            let name = nix::unistd::gethostname().context("gethostname")?.to_string_lossy().into_owned();
            let node = node.as_deref().or_else(|| name.split('.').next()).unwrap_or_default();
            let inventory = fresh_inventory(config)?;
            print!("{}\n", slurm::gres(node, *unit, &inventory, config).map_err(anyhow::Error::msg)?);
        }
        Command::Prolog => report(prolog(config)),
        Command::Epilog => report(epilog(config)),
        Command::TaskProlog => return Ok(task_prolog(config)),
    }
    Ok(ExitCode::SUCCESS)
}

fn report(done: anyhow::Result<()>) {
    if let Err(error) = done {
        eprintln!("sublet: {}", super::tables::chain(&error));
    }
}

/// A variable that slurmd set for the prolog and the epilog, which it runs as root in an environment of its own.
fn variable<T: std::str::FromStr>(name: &str) -> anyhow::Result<T> {
    let value = std::env::var(name).ok().and_then(|value| value.parse().ok());
    value.with_context(|| format!("{name} is not set: slurmd runs this as Prolog= and Epilog= of slurm.conf"))
}

/// Notes what the job got. A failure to find that out is noted, too, and its tasks are then refused with it.
fn prolog(config: &Config) -> anyhow::Result<()> {
    ensure!(!is_remote(config), "the prolog is for slurmd, which runs it as root");
    let (job, uid) = (variable("SLURM_JOB_ID")?, variable("SLURM_JOB_UID")?);
    let share = share_of(job, config).map_err(|error| super::tables::chain(&error));
    JobRecord::new(job, uid, cluster(), share).write(&config.state_dir).context("the job cannot be noted")?;
    make_directory(&config.state_dir, job, uid).context("the job gets no directory for its containers")
}

fn cluster() -> Option<String> {
    std::env::var("SLURM_CLUSTER_NAME").ok()
}

fn share_of(job: u64, config: &Config) -> anyhow::Result<Option<JobShare>> {
    // Slurm sets these for jobs with gpu, shard or mps. Other jobs must not need slurmctld, nor a driver.
    let gpus = ["SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"];
    if gpus.iter().all(|name| std::env::var_os(name).is_none()) {
        return Ok(None);
    }
    let node: String = variable("SLURMD_NODENAME")?;
    let shown = scontrol(&["--details", "show", "job", &job.to_string()])?;
    let names = |hosts: &str| scontrol(&["show", "hostnames", hosts]);
    let is_named = |hosts: &str| names(hosts).is_ok_and(|names| names.lines().any(|name| name == node));
    let is_here = |hosts: &str| hosts == node || hosts.contains(['[', ',']) && is_named(hosts);
    let allocation = slurm::allocation(&of_job(&shown, job), is_here).map_err(anyhow::Error::msg)?;
    if allocation == Allocation::Nothing {
        return Ok(None);
    }
    slurm::job_share(&allocation, &fresh_inventory(config)?, config).map_err(anyhow::Error::msg)
}

/// The part of `shown` that is of `job`: for a job array, scontrol shows the whole array under the id of its last job.
fn of_job(shown: &str, job: u64) -> String {
    let mine = format!("JobId={job}");
    let parts = shown.split("\n\n");
    parts.filter(|part| part.split_whitespace().next() == Some(&mine)).collect()
}

fn scontrol(arguments: &[&str]) -> anyhow::Result<String> {
    match child::run(Program::new("scontrol").args(arguments), "", SCONTROL) {
        Ok(done) if done.status.success() => Ok(done.stdout),
        Ok(done) => bail!("scontrol {}: {}", arguments.join(" "), safe(done.stderr.trim())),
        Err(ChildError::Io(error)) => Err(error).context("cannot run scontrol"),
        Err(ChildError::Timeout) => {
            bail!("scontrol took longer than {} s: does slurmctld answer?", SCONTROL.as_secs())
        }
    }
}

/// Forgets the job, and frees its lease once its processes are gone, which slurmd has ended before.
fn epilog(config: &Config) -> anyhow::Result<()> {
    ensure!(!is_remote(config), "the epilog is for slurmd, which runs it as root");
    let job: u64 = variable("SLURM_JOB_ID")?;
    let is_ours = JobRecord::remove(&config.state_dir, job, cluster().as_deref())
        .context("the job's record cannot be removed")?;
    // Otherwise the lease is that of another cluster's job, which runs.
    if is_ours {
        for lease in Local::new(config).end_job(job)? {
            println!("Freed lease {lease} of job {job}.");
        }
    }
    remove_stray_directories(&config.state_dir);
    forget_ended(config).context("records of jobs that have ended")
}

/// Removes records of jobs whose epilog never ran, because it was killed or slurmd was not there.
/// slurmctld is asked for jobs without a process only: there may be one that has not started yet.
fn forget_ended(config: &Config) -> anyhow::Result<()> {
    let Some(cluster) = cluster() else { return Ok(()) };
    let old = JobRecord::older_than(FORGOTTEN, &config.state_dir)?;
    let ours = old.iter().filter(|record| record.cluster.as_deref() == Some(&cluster));
    let ours: Vec<u64> = ours.map(|record| record.job).collect();
    if ours.is_empty() {
        return Ok(());
    }
    let live = JobCgroup::jobs()?;
    for job in ours.into_iter().filter(|job| !live.contains(job)).take(MOST_ASKED) {
        if has_ended(job)? {
            JobRecord::remove(&config.state_dir, job, Some(&cluster))?;
            println!("Removed the record of job {job}, whose epilog did not run.");
        }
    }
    Ok(())
}

/// Whether slurmctld says that a job has ended, or that it knows of none.
fn has_ended(job: u64) -> anyhow::Result<bool> {
    let shown = match scontrol(&["show", "job", &job.to_string()]) {
        Ok(shown) => of_job(&shown, job),
        Err(error) if error.to_string().contains("Invalid job id") => return Ok(true),
        Err(error) => return Err(error),
    };
    let state = shown.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
    Ok(state.is_some_and(|state| ENDED.contains(&state)))
}

/// Prints what slurmstepd sets in the task's environment, or for its user why there is no share.
fn task_prolog(config: &Config) -> ExitCode {
    let is_written = match environment(config) {
        Ok(lines) => std::io::stdout().write_all(lines.as_bytes()).is_ok(),
        Err(error) => {
            print!("print sublet: {}\n", replace_ids(&super::tables::chain(&error)));
            false
        }
    };
    if is_written { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn environment(config: &Config) -> anyhow::Result<String> {
    // Root's jobs are not bounded, as root's containers are not.
    if !is_remote(config) {
        return Ok(String::new());
    }
    let us = i32::try_from(std::process::id())?;
    let cgroup = JobCgroup::of(us).map_err(JobError::Cgroup)?.ok_or(JobError::NotInJob)?;
    let mut broker = Broker::new(config);
    let found = environment_in(cgroup.job, &mut broker, config);
    let is_silent = |error: &anyhow::Error| {
        error.downcast_ref::<BrokerError>().is_some_and(|error| !matches!(error, BrokerError::Refused { .. }))
    };
    // For `sublet status --last-error`. A service that does not answer cannot note that itself.
    if let Some(error) = found.as_ref().err().filter(|error| !is_silent(error)) {
        let reason = super::tables::chain(error);
        let id = format!("slurm-{}", cgroup.job);
        let _ = broker.ask(&Ask::Refused { id, reason, candidates: Vec::new(), started: false });
    }
    found
}

fn environment_in(job: u64, broker: &mut Broker, config: &Config) -> anyhow::Result<String> {
    // A job without a GPU must not need the service.
    let record = JobRecord::read(&config.state_dir, job)?;
    if record.share.is_none() && record.problem.is_none() {
        return Ok(String::new());
    }
    let began = Instant::now();
    loop {
        match broker.ask(&Ask::Job) {
            // Slurm gives a GPU away as soon as the job before has ended, and the driver its memory back a moment later. So
            // what may change is asked again for a while.
            Err(BrokerError::Refused { temporary: true, .. }) if began.elapsed() < SETTLING => {
                std::thread::sleep(ASK_AGAIN);
            }
            Ok(Answer::Job(given)) => {
                return Ok(given.map(|given| lines(&given.of_this_task())).unwrap_or_default());
            }
            Ok(_) => {
                bail!("sublet serve gave an answer that does not fit: run `systemctl restart sublet.service`")
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// `unset` and `export` lines (slurm.conf(5), `TaskProlog`).
fn lines(given: &JobEnvironment) -> String {
    let stray = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(|name| {
        let ours = given.remove_prefixes.iter().any(|prefix| name.starts_with(prefix));
        ours && !given.set.iter().any(|(known, _)| known == name)
    });
    let unset = stray.map(|name| format!("unset {name}\n"));
    let set = given.set.iter().map(|(name, value)| format!("export {name}={value}\n"));
    unset.chain(set).collect()
}
