//! The details of one container or device, as lines.

use super::history::{Trace, lease_key};
use super::rows::{both, percent, power};
use super::skin::Skin;
use super::source::Look;
use super::view::{Pane, View};
use crate::shown::{self, Device, Words, busy, called, memory_of, whole, word};
use crate::status::{GuardEvent, LeaseOnDevice, Status};
use crate::usage::ProcessUse;
use sublet_core::text::{LONGEST_NAME, safe};

/// Of guard events the latest of these.
const EVENTS: usize = 8;

/// Details of what the cursor is on.
pub fn of(view: &View, width: usize, skin: Skin) -> Vec<String> {
    let Some(look) = &view.look else { return Vec::new() };
    let at = view.selected(view.pane);
    let spark = |key: &str, trace| view.history.sparkline(key, trace, width.saturating_sub(11), skin.utf8);
    let lines = match view.pane {
        Pane::Gpus => view.devices().get(at).map(|row| device(row, &look.status, &spark)),
        Pane::Containers => view.containers().get(at).map(|lease| container(lease, look, &spark)),
    };
    lines.unwrap_or_default()
}

type Spark<'a> = dyn Fn(&str, Trace) -> String + 'a;

fn row(title: &str, text: impl std::fmt::Display) -> String {
    format!("  {title:<10} {text}")
}

fn container(lease: &LeaseOnDevice, look: &Look, spark: &Spark<'_>) -> Vec<String> {
    let status = &look.status;
    let or_dash = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), safe);
    let engine = lease.engine.as_ref().map_or_else(|| "-".to_owned(), word);
    let (part_of, unit) = (or_dash(&lease.part_of), or_dash(&lease.unit));
    let shown = Words::of(lease, status, LONGEST_NAME);
    let most = lease.memory_bytes.map_or_else(|| whole(lease), shown::memory);
    let key = lease_key(lease);
    let mut lines = vec![
        format!("Container {}", shown.name),
        row("image", format!("{}   user {}", or_dash(&lease.image), safe(&lease.user))),
        row("engine", format!("{engine}   part of {part_of}   unit {unit}")),
        row("id", safe(&lease.container_id)),
        "Grant".to_owned(),
        row("lease", format!("{}, {}, since {}", lease.id, shown.state, lease.since)),
        row("device", format!("{} ({}), {}", shown.gpu, safe(&lease.device), shown.mode)),
        row("limits", format!("SM {}, memory {most}", shown.sm)),
        "Use".to_owned(),
        row("memory", shown.memory),
        row("busy", shown.busy),
        row("memory", spark(&key, Trace::Memory)),
        row("busy", spark(&key, Trace::Load)),
    ];
    lines.extend(processes(lease, look));
    lines.push("Guard events".to_owned());
    let its = |event: &&GuardEvent| event.container_id.as_ref() == Some(&lease.container_id);
    let events: Vec<&GuardEvent> = status.guard.events.iter().filter(its).collect();
    let latest = &events[events.len().saturating_sub(EVENTS)..];
    lines.extend(latest.iter().map(|event| format!("  {}  {}", event.time, safe(&event.text))));
    if latest.is_empty() {
        lines.push("  none".to_owned());
    }
    lines.extend(with_server(lease, status));
    lines
}

fn processes(lease: &LeaseOnDevice, look: &Look) -> Vec<String> {
    let Some(count) = lease.used.processes else {
        return vec!["Processes".to_owned(), "  the driver does not list them".to_owned()];
    };
    let its = look.processes.get(&(lease.id.clone(), lease.device.clone()));
    let line = |ProcessUse { holder, sm_percent }: &ProcessUse| {
        let memory = holder.memory_bytes.map_or_else(|| "-".to_owned(), shown::memory);
        let busy = percent(sm_percent.map(f64::from));
        format!("  {:<10} {memory:>10} {busy:>6}  {}", holder.process.pid, safe(&holder.name))
    };
    let lines = its.into_iter().flatten().map(line);
    std::iter::once(format!("Processes on this device: {count}")).chain(lines).collect()
}

/// What would end with the container's work if its MPS server failed.
fn with_server(lease: &LeaseOnDevice, status: &Status) -> Vec<String> {
    let title = "If its MPS server fails".to_owned();
    let Some(daemon) = &lease.daemon else {
        return vec![title, "  it has none: a fault in another container does not end its work".to_owned()];
    };
    let is_other = |other: &&LeaseOnDevice| other.daemon.as_ref() == Some(daemon) && other.id != lease.id;
    let mut others: Vec<String> = status.leases.iter().filter(is_other).map(called).collect();
    others.dedup();
    let mut lines = vec![title, format!("  its GPU work ends (MPS daemon {})", safe(daemon))];
    if others.is_empty() {
        lines.push("  and no other container's".to_owned());
    } else {
        lines.push(format!("  and that of {} more:", others.len()));
        lines.extend(others.into_iter().map(|name| format!("    {name}")));
    }
    lines
}

fn device(device: &Device<'_>, status: &Status, spark: &Spark<'_>) -> Vec<String> {
    let Device { uuid, number, mode, booked, .. } = device;
    let (kind, place) = match device.part {
        None => ("GPU", device.gpu.bus_id.clone()),
        Some(part) => ("MIG device", format!("GPU instance {}, compute instance {}", part.gi, part.ci)),
    };
    let memory_booked = shown::memory(booked.memory_bytes);
    let whole = shown::memory(device.memory_bytes);
    let mut lines = vec![
        format!("{kind} {number}: {}", safe(device.name)),
        row("id", safe(uuid)),
        row("at", format!("{}, {mode}", safe(&place))),
        row("booked", format!("SM {} %, memory {memory_booked} of {whole}", booked.sm_percent)),
    ];
    lines.extend(device.unknown.map(|why| format!("  the driver tells nothing: {}", safe(why))));
    lines.extend(figures(device));
    lines.push(row("memory", spark(uuid, Trace::Memory)));
    lines.push(row("busy", spark(uuid, Trace::Load)));
    lines.push("Containers".to_owned());
    let on_it: Vec<_> = status.leases.iter().filter(|lease| lease.device == *uuid).collect();
    let line =
        |lease: &&LeaseOnDevice| format!("  {:<32} {:<14} {}", called(lease), busy(lease), memory_of(lease));
    lines.extend(on_it.iter().map(line));
    if on_it.is_empty() {
        lines.push("  none".to_owned());
    }
    lines
}

fn figures(device: &Device<'_>) -> Vec<String> {
    let Some(used) = device.used else { return Vec::new() };
    let memory = |bytes: Option<u64>| bytes.map_or_else(|| "-".to_owned(), shown::memory);
    let celsius = used.temperature_celsius.map_or_else(|| "-".to_owned(), |degrees| format!("{degrees} C"));
    let (in_use, load, power) = (memory(used.memory_bytes), percent(device.load()), power(used));
    let [sms, occupancy, tensor, dram] =
        [used.sm_percent, used.occupancy_percent, used.tensor_percent, used.dram_percent].map(percent);
    let [pcie, nvlink] = [used.pcie_bytes_per_second, used.nvlink_bytes_per_second].map(both);
    let gpm = format!("SMs {sms}, occupancy {occupancy}, tensor cores {tensor}, memory bandwidth {dram}");
    let mut lines = vec![
        row("used", format!("memory {in_use}, busy {load}, {power}, {celsius}")),
        row("GPM", gpm),
        row("out + in", format!("PCIe {pcie} /s, NVLink {nvlink} /s")),
    ];
    let outside = used.outside.iter();
    lines.extend(outside.map(|process| {
        row("no lease", format!("{} (pid {}), {}", process.name, process.pid, memory(process.memory_bytes)))
    }));
    lines
}
