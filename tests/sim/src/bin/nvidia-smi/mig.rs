//! `nvidia-smi mig`: lists, makes and destroys instances, in the words and columns of driver 580.
//!
//! The tables of profiles and placements were compared with a real H200's (docs/evidence). The tables of instances and
//! all sentences were compared with output published for A100 and H100.

use anyhow::{Context, Result, bail, ensure};
use nvml_wrapper::Device;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{nvmlGpuInstance_t, nvmlGpuInstancePlacement_t};

use super::raw::{Mig, name};
use super::text_of;

/// The options of `mig`.
#[derive(Default)]
pub struct Options {
    task: String,
    value: Option<String>,
    default_compute: bool,
    gpu_instance: Option<Vec<u32>>,
    compute_instance: Option<Vec<u32>>,
    /// `-i`.
    pub id: Option<String>,
}

const TASKS: [&str; 9] = ["-lgip", "-lgipp", "-lgi", "-lci", "-lcip", "-cgi", "-dgi", "-cci", "-dci"];

impl Options {
    /// The words after `mig`.
    pub fn parse(words: &[String]) -> Result<Self> {
        let mut options = Self::default();
        let mut words = words.iter().map(String::as_str).peekable();
        while let Some(word) = words.next() {
            match word {
                "-i" | "--id" => options.id = Some(words.next().context("-i needs a value")?.to_owned()),
                "-gi" => options.gpu_instance = Some(numbers(words.next())?),
                "-ci" => options.compute_instance = Some(numbers(words.next())?),
                "-C" => options.default_compute = true,
                task if TASKS.contains(&task) => {
                    ensure!(options.task.is_empty(), "{task} beside {}", options.task);
                    task.clone_into(&mut options.task);
                    let value =
                        words.next_if(|word| matches!(task, "-cgi" | "-cci") && !word.starts_with('-'));
                    options.value = value.map(str::to_owned);
                }
                other => bail!("Invalid combination of input arguments: {other}"),
            }
        }
        ensure!(!options.task.is_empty(), "mig needs one of {}", TASKS.join(" "));
        Ok(options)
    }

    fn wants(&self, gpu_instance: u32) -> bool {
        self.gpu_instance.as_ref().is_none_or(|wanted| wanted.contains(&gpu_instance))
    }

    fn wants_compute(&self, compute: u32) -> bool {
        self.compute_instance.as_ref().is_none_or(|wanted| wanted.contains(&compute))
    }
}

fn numbers(text: Option<&str>) -> Result<Vec<u32>> {
    let text = text.context("a value is missing")?;
    text.split(',').map(|number| number.parse().with_context(|| format!("{number} is no id"))).collect()
}

/// Runs the command for these GPUs. For GPUs not in MIG mode it only lists possible instances.
pub fn run(devices: &[Device<'_>], options: &Options) -> Result<()> {
    let on = |device: &&Device<'_>| device.mig_mode().is_ok_and(|mode| mode.current == 1);
    let capable = |device: &&Device<'_>| device.mig_mode().is_ok();
    let profiles = matches!(options.task.as_str(), "-lgip" | "-lgipp");
    let devices: Vec<_> =
        devices.iter().filter(|device| if profiles { capable(device) } else { on(device) }).collect();
    if devices.is_empty() {
        println!("No MIG-{} devices found.", if profiles { "supported" } else { "enabled" });
        return Ok(());
    }
    head(&options.task);
    for device in devices {
        let (mig, gpu) = (Mig::new(device), device.index()?);
        match options.task.as_str() {
            "-lgip" => list_profiles(&mig, gpu)?,
            "-lgipp" => list_placements(&mig, gpu)?,
            "-lgi" => list_instances(&mig, gpu)?,
            "-lci" => list_compute(&mig, gpu, options)?,
            "-lcip" => list_compute_profiles(&mig, gpu, options)?,
            "-cgi" => create(&mig, gpu, options)?,
            "-dgi" => destroy(&mig, gpu, options)?,
            "-cci" => create_compute(&mig, gpu, options)?,
            _ => destroy_compute(&mig, gpu, options)?,
        }
    }
    Ok(())
}

const PROFILES: usize = 79;
const INSTANCES: usize = 57;
const COMPUTE: usize = 68;
const COMPUTE_PROFILES: usize = 86;

fn rule(width: usize) {
    println!("+{}+", "-".repeat(width));
}

fn row(width: usize, text: &str) {
    println!("|{text:<width$}|");
}

fn head(task: &str) {
    let (width, lines): (usize, &[&str]) = match task {
        "-lgip" => (
            PROFILES,
            &[
                " GPU instance profiles:",
                " GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC",
                "                                Free/Total   GiB              CE    JPEG  OFA",
            ],
        ),
        "-lgi" => (
            INSTANCES,
            &[
                " GPU instances:",
                " GPU   Name               Profile  Instance   Placement",
                "                            ID       ID       Start:Size",
            ],
        ),
        "-lci" => (
            COMPUTE,
            &[
                " Compute instances:",
                " GPU     GPU       Name             Profile   Instance   Placement",
                "       Instance                       ID        ID       Start:Size",
                "         ID",
            ],
        ),
        "-lcip" => (
            COMPUTE_PROFILES,
            &[
                " Compute instance profiles:",
                " GPU     GPU       Name             Profile  Instances   Exclusive       Shared",
                "       Instance                       ID     Free/Total     SM       DEC   ENC   OFA",
                "         ID                                                          CE    JPEG",
            ],
        ),
        _ => return,
    };
    rule(width);
    for line in lines {
        row(width, line);
    }
    println!("|{}|", "=".repeat(width));
}

#[expect(clippy::cast_precision_loss, reason = "MiB of one GPU")]
fn list_profiles(mig: &Mig<'_>, gpu: u32) -> Result<()> {
    for info in mig.profiles() {
        let free = format!("{}/{}", mig.remaining(info.id)?, info.instanceCount);
        let memory = format!("{:.2}", info.memorySizeMB as f64 / 1024.0);
        let p2p = if info.isP2pSupported == 1 { "Yes" } else { "No" };
        let first = format!(
            "{gpu:>4}  {:<18}{:>4}     {free:<11}{memory:<11}{p2p:<7}{:<7}{:<6}{}",
            name(&info.name),
            info.id,
            info.multiprocessorCount,
            info.decoderCount,
            info.encoderCount
        );
        let (copy, jpeg) = (info.copyEngineCount, info.jpegCount);
        row(PROFILES, &first);
        row(PROFILES, &format!("{:63}{copy:<6}{jpeg:<6}{}", "", info.ofaCount));
        rule(PROFILES);
    }
    Ok(())
}

fn list_placements(mig: &Mig<'_>, gpu: u32) -> Result<()> {
    for info in mig.profiles() {
        let places = mig.placements(info.id)?;
        let starts: Vec<String> = places.iter().map(|place| place.start.to_string()).collect();
        let word = if starts.len() == 1 { "Placement " } else { "Placements" };
        let size = places.first().map_or(0, |place| place.size);
        println!("GPU {gpu:>2} Profile ID {:>2} {word}: {{{}}}:{size}", info.id, starts.join(","));
    }
    Ok(())
}

fn list_instances(mig: &Mig<'_>, gpu: u32) -> Result<()> {
    for (_, info, name) in mig.instances().context("Failed to display GPU instances")? {
        let (id, profile, place) = (info.id, info.profileId, info.placement);
        row(INSTANCES, &format!("{gpu:>4}  {name:<20}{profile:>4}{id:>9}{:>11}:{}", place.start, place.size));
        rule(INSTANCES);
    }
    Ok(())
}

fn list_compute(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for (handle, parent, _) in wanted(mig, options).context("Failed to display compute instances")? {
        for (_, info, name) in mig.compute(handle)? {
            let (profile, id, place) = (info.profileId, info.id, info.placement);
            let text = format!(
                "{gpu:>4}{parent:>7}       {name:<20}{profile:>2}{id:>10}{:>11}:{}",
                place.start, place.size
            );
            row(COMPUTE, &text);
            rule(COMPUTE);
        }
    }
    Ok(())
}

fn list_compute_profiles(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for (handle, parent, whole) in wanted(mig, options)? {
        for info in mig.compute_profiles(handle) {
            let name = name(&info.name);
            let free = format!("{}/{}", mig.compute_remaining(handle, info.id)?, info.instanceCount);
            let star = if name == whole { "*" } else { " " };
            let first = format!(
                "{gpu:>4}{parent:>7}       {name:<20}{:>2}{star}     {free:<14}{:<9}{:>2}{:>6}{:>6}",
                info.id,
                info.multiprocessorCount,
                info.sharedDecoderCount,
                info.sharedEncoderCount,
                info.sharedOfaCount
            );
            row(COMPUTE_PROFILES, &first);
            let (copy, jpeg) = (info.sharedCopyEngineCount, info.sharedJpegCount);
            row(COMPUTE_PROFILES, &format!("{:69}{copy:>2}{jpeg:>6}", ""));
            rule(COMPUTE_PROFILES);
        }
    }
    Ok(())
}

/// GPU instances that `-gi` names, or all: handle, id and profile name.
fn wanted(mig: &Mig<'_>, options: &Options) -> Result<Vec<(nvmlGpuInstance_t, u32, String)>> {
    let all = mig.instances()?.into_iter().map(|(handle, info, name)| (handle, info.id, name));
    let found: Vec<_> = all.filter(|(_, id, _)| options.wants(*id)).collect();
    ensure!(!found.is_empty(), NvmlError::NotFound);
    Ok(found)
}

/// `-cgi`'s tuples: a profile's id or name, and the start of its placement.
fn create(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for word in options.value.as_deref().context("-cgi needs profiles")?.split(',') {
        let (profile, start) = match word.split_once(':') {
            Some((profile, start)) => (profile, Some(start.parse()?)),
            None => (word, None),
        };
        let info = mig.profiles().into_iter().find(|info| {
            profile.parse() == Ok(info.id) || name(&info.name).trim_start_matches("MIG ") == profile
        });
        let info = info.with_context(|| format!("{profile} is no GPU instance profile"))?;
        let size = mig.placements(info.id)?.first().map_or(0, |place| place.size);
        let place = start.map(|start| nvmlGpuInstancePlacement_t { start, size });
        let made = mig.create(info.id, place).inspect_err(|error| {
            println!(
                "Unable to create a GPU instance on GPU {gpu:>2} using profile {}: {}",
                info.id,
                text_of(error)
            );
        });
        let made = made.context("Failed to create GPU instances")?;
        let (id, name) = (mig.info(made)?.id, name(&info.name));
        println!(
            "Successfully created GPU instance ID {id:>2} on GPU {gpu:>2} using profile {name} (ID {:>2})",
            info.id
        );
        if options.default_compute {
            create_in(mig, gpu, made, id, None)?;
        }
    }
    Ok(())
}

/// Creates the requested profiles in every requested GPU instance. Without profiles it creates one that is the whole
/// instance.
fn create_compute(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for (handle, id, _) in wanted(mig, options)? {
        match options.value.as_deref() {
            None => create_in(mig, gpu, handle, id, None)?,
            Some(words) => {
                words.split(',').try_for_each(|word| create_in(mig, gpu, handle, id, Some(word)))?;
            }
        }
    }
    Ok(())
}

fn create_in(mig: &Mig<'_>, gpu: u32, handle: nvmlGpuInstance_t, id: u32, word: Option<&str>) -> Result<()> {
    let profiles = mig.compute_profiles(handle);
    let is_it = |text: &str, number: u32, word: &str| {
        word.parse() == Ok(number) || text.trim_start_matches("MIG ") == word
    };
    let mut named =
        profiles.iter().filter(|info| word.is_none_or(|word| is_it(&name(&info.name), info.id, word)));
    let info = if word.is_none() { named.max_by_key(|info| info.sliceCount) } else { named.next() };
    let info =
        info.with_context(|| format!("{} is no compute instance profile", word.unwrap_or_default()))?;
    let made = mig.create_compute(handle, info.id).inspect_err(|error| {
        let text = text_of(error);
        let of = format!("GPU {gpu:>2} GPU instance ID {id:>2} using profile {}", info.id);
        println!("Unable to create a compute instance on {of}: {text}");
    });
    let made = made.context("Failed to create compute instances")?.id;
    let (name, profile) = (name(&info.name), info.id);
    println!(
        "Successfully created compute instance ID {made:>2} on GPU {gpu:>2} GPU instance ID {id:>2} \
         using profile {name} (ID {profile:>2})"
    );
    Ok(())
}

fn destroy(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for (handle, id, _) in wanted(mig, options)? {
        let done = mig.destroy(handle).inspect_err(|error| {
            println!("Unable to destroy GPU instance ID {id:>2} from GPU {gpu:>2}: {}", text_of(error));
        });
        done.context("Failed to destroy GPU instances")?;
        println!("Successfully destroyed GPU instance ID {id:>2} from GPU {gpu:>2}");
    }
    Ok(())
}

fn destroy_compute(mig: &Mig<'_>, gpu: u32, options: &Options) -> Result<()> {
    for (handle, parent, _) in wanted(mig, options)? {
        for (handle, info, _) in mig.compute(handle)? {
            let id = info.id;
            if !options.wants_compute(id) {
                continue;
            }
            let of = format!("compute instance ID {id:>2} from GPU {gpu:>2} GPU instance ID {parent:>2}");
            let done = mig.destroy_compute(handle);
            let done = done.inspect_err(|error| println!("Unable to destroy {of}: {}", text_of(error)));
            done.context("Failed to destroy compute instances")?;
            println!("Successfully destroyed {of}");
        }
    }
    Ok(())
}
