//! `sublet advise`: which way of sharing suits so many tenants, as text to paste. Books nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;

use super::tables::{self, Format, bold};
use crate::advise::{
    self, Advice, AdviseError, Host, MOST, Measurements, NoAdvice, Paste, Question, Trust, Verdict,
};
use crate::bench::{BenchResult, Sharing};
use crate::preview::{EMPTY, Whose, does_not_protect, emptied, seen_ledger};
use crate::shown::{memory, name_of};
use sublet_core::admit::{is_remote, refresh};
use sublet_core::config::Config;
use sublet_core::inventory::{Device, Inventory};
use sublet_core::place::meant;
use sublet_core::share::{MEMORY_ALLOWED, Memory, Percent, parse_memory};

/// Arguments of `sublet advise`.
#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A result of sublet bench to advise from; without one, only rules and data sheets are used
    #[arg(long, value_name = "RESULT.json")]
    from: Option<PathBuf>,
    /// The load of that result, if it has several
    #[arg(long, value_name = "LOAD")]
    load: Option<String>,
    /// How many containers share
    #[arg(long, value_name = "N", default_value_t = 7)]
    tenants: u32,
    /// How long an iteration may take 99 times of 100, such as 20ms
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    p99: Option<Duration>,
    /// The GPU memory that each needs, such as 10GiB; without it each gets an equal part
    #[arg(long, value_name = "AMOUNT", value_parser = amount)]
    memory: Option<Memory>,
    /// How far they trust each other
    #[arg(long, value_enum, default_value_t)]
    trust: Trust,
    /// The GPU, as in sublet.gpu; without it the first that will do
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// Answer as if nothing were on the GPUs: no container and no other process
    #[arg(long)]
    empty: bool,
    /// Answer for your own rootless containers, even if you may use Docker's socket
    #[arg(long)]
    rootless: bool,
    /// Output format: text or JSON
    #[arg(long, value_enum, default_value_t)]
    format: Format,
}

fn amount(text: &str) -> Result<Memory, String> {
    parse_memory(text).map_err(|hint| hint.unwrap_or_else(|| format!("must be {MEMORY_ALLOWED}")))
}

/// Runs it. The exit code is 1 if there is no advice.
///
/// # Errors
/// There is no driver, GPU or ledger; the result cannot be used; the question makes no sense.
pub fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<ExitCode> {
    if arguments.tenants == 0 || arguments.tenants > MOST {
        return Err(AdviseError::Tenants(arguments.tenants).into());
    }
    if arguments.p99.is_some_and(|p99| p99.is_zero()) {
        return Err(AdviseError::P99.into());
    }
    if arguments.load.is_some() && arguments.from.is_none() {
        return Err(AdviseError::LoadOfNothing.into());
    }
    let question = Question {
        tenants: arguments.tenants,
        memory: arguments.memory,
        p99_ms: arguments.p99.map(|p99| p99.as_secs_f64() * 1000.0),
        trust: arguments.trust,
        named: arguments.gpu.is_some(),
    };
    let result = arguments.from.as_deref().map(BenchResult::read).transpose().map_err(AdviseError::from)?;
    let whose = Whose::meant(arguments.rootless, config);
    // The amounts depend on what is free now, and the compute mode may be that of an MPS server that has ended.
    let inventory = if is_remote(config) { whose.inventory(config)? } else { refresh(config)? };
    let (ledger, inventory) = emptied(arguments.empty, (seen_ledger(config)?, inventory));
    let gpus = gpus(arguments.gpu.as_deref(), &inventory, config)?;
    let largest = gpus.iter().map(|gpu| gpu.memory_bytes).max().unwrap_or_default();
    // A part of it is never too much.
    let asked = question.memory.map_or(0, |memory| memory.on(0));
    if asked > largest {
        return Err(AdviseError::Memory { asked: memory(asked), has: memory(largest) }.into());
    }
    let host = Host { inventory: &inventory, ledger: &ledger, whose, config };
    let mut answer = answer(&question, &gpus, result.as_ref(), arguments.load.as_deref(), host)?;
    answer.remarks.extend(whose.remark(config).map(|whose| format!("this is about {whose}")));
    answer.remarks.extend(arguments.empty.then(|| EMPTY.to_owned()));
    answer.remarks.extend(inventory.driver.simulated.then(|| "the driver is simulated".to_owned()));
    let document = Document::of(&question, &answer, &inventory);
    match arguments.format {
        Format::Json => tables::json(&document)?,
        Format::Table => {
            println!("{}", text(&document));
            document.advice.iter().for_each(|advice| print!("{}", to_paste(advice)));
        }
    }
    Ok(if document.advice.is_some() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The GPUs in question.
fn gpus<'a>(
    named: Option<&str>,
    inventory: &'a Inventory,
    config: &Config,
) -> Result<Vec<&'a Device>, AdviseError> {
    let Some(named) = named else {
        let gpus: Vec<_> = inventory.gpus().collect();
        return if gpus.is_empty() { Err(AdviseError::NoGpu) } else { Ok(gpus) };
    };
    let wrong = |why: &str| AdviseError::NotThatGpu { asked: named.to_owned(), why: why.to_owned() };
    let found = meant(named, inventory, config).map_err(|why| wrong(&why))?;
    if found.iter().any(|device| device.is_mig()) {
        return Err(wrong("it is a MIG device: name its GPU"));
    }
    if found.is_empty() { Err(wrong("this host has no such GPU")) } else { Ok(found) }
}

/// The answer for one GPU.
struct Answer<'a> {
    gpu: &'a Device,
    advice: Result<Advice, NoAdvice>,
    remarks: Vec<String>,
}

/// The answer for the first GPU that has an advice, else for the first.
fn answer<'a>(
    question: &Question,
    gpus: &[&'a Device],
    result: Option<&BenchResult>,
    load: Option<&str>,
    host: Host<'_>,
) -> anyhow::Result<Answer<'a>> {
    let mut first = None;
    for gpu in gpus {
        let measured = result.map(|result| Measurements::of(result, load, gpu)).transpose()?;
        let (measurements, mut remarks) = measured.unwrap_or_default();
        remarks.extend(not_judged(question, gpu, measurements.as_ref()));
        let advice = advise::advise(question, gpu, measurements.as_ref(), host)?;
        let answer = Answer { gpu, advice, remarks };
        if answer.advice.is_ok() {
            return Ok(answer);
        }
        first.get_or_insert(answer);
    }
    Ok(first.ok_or(AdviseError::NoGpu)?)
}

/// The questions that the measurements leave open.
fn not_judged(question: &Question, gpu: &Device, measurements: Option<&Measurements<'_>>) -> Vec<String> {
    let Some(command) = advise::measure_with(question, gpu) else { return Vec::new() };
    let mut open = Vec::new();
    let measured = match measurements.map(|found| (found, found.verdict(question))) {
        Some((found, Verdict::NotMeasured)) => {
            let most = found.largest(question.trust).map_or_else(
                || format!("no way that --trust {} allows was measured", name_of(&question.trust)),
                |most| format!("{} at once were not measured, and no more than {most}", question.tenants),
            );
            open.push(format!("not measured: {most}"));
            false
        }
        Some((found, _)) => found.same_gpu,
        None => false,
    };
    if question.p99_ms.is_some() && !measured {
        open.push("a p99 cannot be judged without a measurement on such a GPU".to_owned());
    } else if measurements.is_none() {
        open.push("nothing was measured".to_owned());
    }
    open.into_iter().map(|what| format!("{what}; measure it with: {command}")).collect()
}

/// What is printed as JSON: keys may be added, never changed.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Advise")]
pub struct Document<'a> {
    /// `sublet.advise/1`.
    schema: &'static str,
    question: Asked,
    gpu: Gpu<'a>,
    /// Null: nothing that would do fits.
    advice: Option<Advised>,
    /// Why there is none.
    why_not: Option<&'a str>,
    /// What would help then, in sentences.
    would_help: &'a [String],
    /// What is to be known beside it, in sentences.
    remarks: &'a [String],
}

/// What was asked.
#[derive(Serialize, JsonSchema)]
struct Asked {
    tenants: u32,
    /// That each needs.
    memory_bytes: Option<u64>,
    p99_ms: Option<f64>,
    trust: Trust,
}

/// The GPU in question.
#[derive(Serialize, JsonSchema)]
struct Gpu<'a> {
    uuid: &'a str,
    number: String,
    name: &'a str,
    memory_bytes: u64,
    sm_count: Option<u32>,
}

#[derive(Serialize, JsonSchema)]
struct Advised {
    /// In one sentence.
    sentence: String,
    mode: Sharing,
    /// The limit on SMs.
    sm_percent: Option<f64>,
    /// The limit on memory of each, or what its MIG device has at least; null: no limit.
    memory_bytes: Option<u64>,
    /// The MIG profile.
    mig_profile: Option<String>,
    /// UUIDs of the GPUs or MIG devices, one for each tenant whose device exists.
    devices: Vec<String>,
    /// What each tenant gets, a sentence for each different size.
    each_gets: Vec<String>,
    cost: Cost,
    /// What is not protected, in sentences.
    not_protected: Vec<&'static str>,
    /// Of each tenant.
    annotations: BTreeMap<String, String>,
    paste: Paste,
}

/// What sharing costs against having the GPU alone.
#[derive(Default, Serialize, JsonSchema)]
struct Cost {
    /// Whether it was measured, on this model of GPU or another; otherwise it is concluded from rules and data sheets.
    measured: bool,
    /// In a sentence.
    text: String,
    /// The load that was measured.
    load: Option<String>,
    /// How many were measured at once.
    n: Option<u32>,
    /// The mean with so many at once, divided by that of one alone.
    times_as_long: Option<f64>,
    /// The mean with so many at once, on a GPU of this model.
    mean_ms: Option<f64>,
    /// The p99 with so many at once, on a GPU of this model.
    p99_ms: Option<f64>,
    /// The mean of one alone, on a GPU of this model.
    alone_mean_ms: Option<f64>,
    /// The p99 of one alone, on a GPU of this model.
    alone_p99_ms: Option<f64>,
}

impl<'a> Document<'a> {
    fn of(question: &Question, answer: &'a Answer<'_>, inventory: &Inventory) -> Self {
        let gpu = answer.gpu;
        let (advice, none) = (answer.advice.as_ref().ok(), answer.advice.as_ref().err());
        Self {
            schema: "sublet.advise/1",
            question: Asked {
                tenants: question.tenants,
                memory_bytes: question.memory.map(|memory| memory.on(gpu.memory_bytes)),
                p99_ms: question.p99_ms,
                trust: question.trust,
            },
            gpu: Gpu {
                uuid: &gpu.uuid,
                number: gpu.number(),
                name: &gpu.name,
                memory_bytes: gpu.memory_bytes,
                sm_count: gpu.sm_count,
            },
            advice: advice.map(|advice| Advised::of(advice, question, gpu, inventory)),
            why_not: none.map(|none| none.why.as_str()),
            would_help: none.map_or(&[][..], |none| &none.help),
            remarks: &answer.remarks,
        }
    }
}

impl Advised {
    fn of(advice: &Advice, question: &Question, gpu: &Device, inventory: &Inventory) -> Self {
        let Advice { candidate, placements, .. } = advice;
        let first = advice.shares().next();
        let instances = advice.shares().flat_map(|one| &one.mig_devices);
        let smallest = instances.filter_map(|one| one.memory_bytes).min();
        Self {
            sentence: advise::sentence(advice, question, gpu),
            mode: candidate.mode.sharing,
            sm_percent: first.and_then(|one| one.sm).map(Percent::as_f64),
            memory_bytes: smallest.or_else(|| first.and_then(|one| one.memory_bytes)),
            mig_profile: candidate.mode.profile.clone(),
            devices: placements.iter().flat_map(|one| one.devices.clone()).collect(),
            each_gets: advise::each_gets(advice, inventory),
            cost: Cost::of(advice, question, gpu, inventory),
            not_protected: first.map(does_not_protect).unwrap_or_default(),
            annotations: candidate.annotations.clone(),
            paste: Paste::new(&candidate.annotations, question.tenants),
        }
    }
}

impl Cost {
    fn of(advice: &Advice, question: &Question, gpu: &Device, inventory: &Inventory) -> Self {
        let Some(found) = &advice.candidate.found else {
            let text = advise::concluded(advice, question, gpu, inventory);
            return Self { text, ..Self::default() };
        };
        let alone = found.alone.filter(|_| found.same_gpu);
        Self {
            measured: true,
            text: advise::measured_cost(found, question.tenants),
            load: Some(found.load.clone()),
            n: Some(found.n),
            times_as_long: found.alone.map(|(mean, _)| found.mean_ms / mean),
            mean_ms: Some(found.mean_ms).filter(|_| found.same_gpu),
            p99_ms: found.p99_ms.filter(|_| found.same_gpu),
            alone_mean_ms: alone.map(|(mean, _)| mean),
            alone_p99_ms: alone.and_then(|(_, p99)| p99),
        }
    }
}

/// For people.
fn text(document: &Document<'_>) -> String {
    let mut lines = Vec::new();
    if let Some(advice) = &document.advice {
        lines.extend([bold(&advice.sentence), String::new()]);
        lines.extend(advice.each_gets.iter().map(|line| row("Each gets", line)));
        let how = if advice.cost.measured { "measured" } else { "concluded" };
        lines.push(row("It costs", &format!("({how}) {}", advice.cost.text)));
    } else {
        let why = document.why_not.unwrap_or_default();
        lines.push(format!("No advice for {} tenants: {why}", document.question.tenants));
        lines.extend(document.would_help.iter().map(|line| row("Instead", line)));
    }
    lines.extend(document.remarks.iter().map(|line| row("Note", line)));
    if let Some(advice) = &document.advice {
        lines.extend([String::new(), bold("It does not protect")]);
        lines.extend(advice.not_protected.iter().map(|line| format!("  - {line}")));
    }
    lines.join("\n")
}

/// Lines that nothing may break.
fn to_paste(advice: &Advised) -> String {
    let annotations = advice.annotations.iter().map(|(key, value)| format!("{key}={value}\n"));
    let texts = [
        ("Annotations", &annotations.collect::<String>()),
        ("Docker, each tenant", &advice.paste.docker_run),
        ("Compose", &advice.paste.compose),
        ("Quadlet, a .container file for each tenant", &advice.paste.quadlet),
    ];
    let indented = |line: &str| if line.is_empty() { "\n".to_owned() } else { format!("    {line}\n") };
    let block = |(title, text): (&str, &String)| {
        format!("\n{}\n\n{}", bold(title), text.lines().map(indented).collect::<String>())
    };
    texts.map(block).concat()
}

fn row(title: &str, text: &str) -> String {
    format!("{title:<10} {text}")
}
