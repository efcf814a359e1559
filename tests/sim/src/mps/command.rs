//! The daemon's commands and their answers.

use std::fmt::Write;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use super::limits;
use super::message::Settings;
use super::servers::{Client, Servers};

/// The result of a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// An answer.
    Say(String),
    /// The daemon ends.
    Quit,
}

/// Executes one line, received on `control_privileged` or, without privileges, on `control`.
pub fn run(servers: &Arc<Servers>, line: &str, privileged: bool) -> Outcome {
    let words: Vec<&str> = line.split_whitespace().collect();
    let asks = matches!(words.first(), Some(word) if word.starts_with("get_") || *word == "ps");
    if !privileged && !asks {
        let quit = words.first() == Some(&"quit");
        return Outcome::Say(if quit { "Not enough privilege" } else { "Insufficient privileges" }.into());
    }
    if let ["quit", rest @ ..] = &words[..] {
        let limit = match rest {
            ["-t", seconds] => seconds.parse().ok().map(Duration::from_secs),
            _ => None,
        };
        servers.quit(limit);
        return Outcome::Quit;
    }
    let answer = if asks { ask(servers, &words) } else { change(servers, &words) };
    Outcome::Say(answer.unwrap_or_else(|| format!("Unknown command \"{line}\"")))
}

fn ask(servers: &Servers, words: &[&str]) -> Option<String> {
    let table = servers.table();
    let of_server = |pid: &str| pid.parse::<i32>().ok().and_then(|pid| table.servers.get(&pid));
    Some(match words {
        ["get_server_list"] => lines(table.servers.keys()),
        ["get_server_status", pid] => {
            let status = if of_server(pid)?.faulted { "FAULT" } else { "ACTIVE" };
            status.to_owned()
        }
        ["get_client_list", pid] => {
            of_server(pid)?;
            let mut pids: Vec<i32> = clients_of(table.clients.values(), Some(pid)).map(|c| c.pid).collect();
            pids.dedup();
            lines(pids)
        }
        ["get_device_client_list"] => by_device(servers, clients_of(table.clients.values(), None)),
        ["get_device_client_list", pid] => by_device(servers, clients_of(table.clients.values(), Some(pid))),
        ["ps"] => ps(clients_of(table.clients.values(), None)),
        ["ps", "-p", pid] => ps(clients_of(table.clients.values(), Some(pid))),
        ["get_default_active_thread_percentage"] => format!("{:?}", table.defaults.percentage),
        ["get_active_thread_percentage", pid] => format!("{:?}", of_server(pid)?.settings.percentage),
        ["get_default_client_priority"] => table.defaults.priority.to_string(),
        ["get_client_priority", pid] => of_server(pid)?.settings.priority.to_string(),
        ["get_default_device_pinned_mem_limit"] => pinned(servers, &table.defaults, "0")?,
        ["get_default_device_pinned_mem_limit", device] => pinned(servers, &table.defaults, device)?,
        ["get_device_pinned_mem_limit", pid, device] => pinned(servers, &of_server(pid)?.settings, device)?,
        _ => return None,
    })
}

fn change(servers: &Arc<Servers>, words: &[&str]) -> Option<String> {
    let done = String::new;
    if words.first().is_some_and(|word| is_limit(word)) && !servers.limits {
        // This message was never observed: no GPU that old was available.
        return Some("Failed to set a limit: the device is older than Volta".into());
    }
    match words {
        ["start_server", "-uid", uid] => return Some(servers.prewarm(uid.parse().ok()?)),
        ["shutdown_server", pid] => servers.shut_down(pid.parse().ok()?, false),
        ["shutdown_server", pid, "-f"] => servers.shut_down(pid.parse().ok()?, true),
        ["terminate_client", server, client] => {
            let known = servers.terminate(server.parse().ok()?, client.parse().ok()?);
            return Some(if known { "0".into() } else { format!("Client {client} not found") });
        }
        ["set_default_active_thread_percentage", value] => {
            servers.table().defaults.percentage = limits::percentage(value)?;
        }
        ["set_default_client_priority", value] => servers.table().defaults.priority = priority(value)?,
        ["set_default_device_pinned_mem_limit", device, value] => {
            let ordinal = limits::ordinal(device, &servers.devices)?;
            set_pinned(&mut servers.table().defaults, ordinal, value)?;
        }
        ["set_active_thread_percentage", pid, value] => {
            let value = limits::percentage(value)?;
            servers.table().servers.get_mut(&pid.parse().ok()?)?.settings.percentage = value;
            return Some(format!("{value:.1}"));
        }
        ["set_device_pinned_mem_limit", pid, device, value] => {
            let ordinal = limits::ordinal(device, &servers.devices)?;
            let mut table = servers.table();
            set_pinned(&mut table.servers.get_mut(&pid.parse().ok()?)?.settings, ordinal, value)?;
        }
        _ => return None,
    }
    Some(done())
}

fn priority(value: &str) -> Option<u32> {
    value.parse().ok().filter(|value| *value <= 1)
}

/// Whether a command sets a limit that GPUs before Volta do not have.
fn is_limit(word: &str) -> bool {
    word.starts_with("set_") && (word.ends_with("_thread_percentage") || word.ends_with("_mem_limit"))
}

/// Stores the value as it was written. 0 removes the limit (docs/evidence).
fn set_pinned(settings: &mut Settings, ordinal: usize, value: &str) -> Option<()> {
    if value == "0" {
        settings.pinned.remove(&ordinal);
        return Some(());
    }
    limits::size(value)?;
    settings.pinned.insert(ordinal, value.to_owned());
    Some(())
}

fn pinned(servers: &Servers, settings: &Settings, device: &str) -> Option<String> {
    let ordinal = limits::ordinal(device, &servers.devices)?;
    Some(settings.pinned.get(&ordinal).cloned().unwrap_or_default())
}

fn lines<T: ToString>(values: impl IntoIterator<Item = T>) -> String {
    values.into_iter().map(|value| value.to_string()).collect::<Vec<_>>().join("\n")
}

fn clients_of<'a>(
    clients: impl Iterator<Item = &'a Client>,
    server: Option<&str>,
) -> impl Iterator<Item = &'a Client> {
    let server = server.map(|pid| pid.parse().unwrap_or(0));
    clients.filter(move |client| {
        !client.devices.is_empty() && server.is_none_or(|server| server == client.server)
    })
}

fn by_device<'a>(servers: &Servers, clients: impl Iterator<Item = &'a Client>) -> String {
    let clients: Vec<&Client> = clients.collect();
    let of = |device: &String| {
        let pids = clients.iter().filter(|client| client.devices.contains(device));
        pids.fold(device.clone(), |line, client| format!("{line} {}", client.pid))
    };
    lines(servers.devices.iter().map(of))
}

/// The format of the CUDA MPS documentation, which cuts UUIDs after their third group.
fn ps<'a>(clients: impl Iterator<Item = &'a Client>) -> String {
    let mut table =
        format!("{:<8}{:<5}{:<9}{:<25}{:<13}COMMAND", "PID", "ID", "SERVER", "DEVICE", "NAMESPACE");
    let each = clients.flat_map(|client| client.devices.iter().map(move |device| (client, device)));
    for (client, device) in each {
        let device: String = device.chars().take(22).collect();
        let (pid, server, namespace) = (client.pid, client.server, client.namespace);
        let command = command_of(pid);
        // Writing to a String cannot fail.
        let _ = write!(table, "\n{pid:<8}{:<5}{server:<9}{device:<25}{namespace:<13}{command}", 0);
    }
    table
}

fn command_of(pid: i32) -> String {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(line.split(|byte| *byte == 0).next().unwrap_or_default()).into_owned()
}
