//! A Docker Swarm of several nodes on one machine: each has a dockerd, GPUs and a sublet of its own, in network, UTS and
//! mount namespaces of its own. The first one is the manager.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::Value;

use crate::docker::Docker;
use crate::world::{World, bin_dir, eventually};

/// One node: its dockerd, and what it is.
pub struct Node {
    /// Its dockerd, whose daemon.json is the node's /etc/docker/daemon.json.
    pub docker: Docker,
    /// Its host name.
    pub name: String,
    /// Its address on the network of the nodes.
    address: String,
    /// nsenter(1) into its namespaces.
    enter: Vec<String>,
    /// The process that keeps them.
    holder: Child,
}

/// The nodes, the manager first.
pub struct Swarm {
    /// Empty on the way down.
    pub nodes: Vec<Node>,
    /// The bridge between them, a network of its own.
    bridge: String,
}

/// Tests run beside each other.
static SWARMS: AtomicUsize = AtomicUsize::new(0);

impl Swarm {
    /// Joins a node for each of `worlds`; `settings` override every daemon.json.
    #[must_use]
    pub fn up(worlds: Vec<World>, settings: &dyn Fn(&World) -> Value) -> Self {
        let bridge = format!("swarm{}", SWARMS.fetch_add(1, Ordering::Relaxed));
        let made = format!("ip link add {bridge} type bridge && ip link set {bridge} up");
        done(Command::new("sh").args(["-c", &made]));
        let mut swarm = Self { nodes: Vec::new(), bridge };
        for (number, world) in (1..).zip(worlds) {
            swarm.nodes.push(Node::up(number, &swarm.bridge, world, settings));
        }
        let manager = swarm.manager();
        manager.docker.done(&["swarm", "init", "--advertise-addr", &manager.address]);
        let token = manager.docker.ask(&["swarm", "join-token", "-q", "worker"]);
        for node in &swarm.nodes[1..] {
            let at = format!("{}:2377", manager.address);
            node.docker.done(&["swarm", "join", "--advertise-addr", &node.address, "--token", &token, &at]);
        }
        assert!(eventually(|| swarm.ready() == swarm.nodes.len()), "{}", manager.docker.ask(&["node", "ls"]));
        swarm
    }

    /// The node that decides where tasks go.
    #[must_use]
    pub fn manager(&self) -> &Node {
        &self.nodes[0]
    }

    /// How many nodes the manager can reach.
    #[must_use]
    pub fn ready(&self) -> usize {
        let all = self.manager().docker.ask(&["node", "ls", "--format", "{{.Status}}"]);
        all.lines().filter(|status| *status == "Ready").count()
    }

    /// The service's tasks that are to run or to start, each as node, state and error, separated by `|`.
    #[must_use]
    pub fn tasks(&self, service: &str) -> Vec<String> {
        let format = "{{.DesiredState}}|{{.Node}}|{{.CurrentState}}|{{.Error}}";
        let all = self.manager().docker.ask(&["service", "ps", "--no-trunc", "--format", format, service]);
        let wanted = all.lines().filter_map(|line| line.split_once('|'));
        wanted
            .filter(|(desired, _)| matches!(*desired, "Running" | "Ready"))
            .map(|(_, task)| task.into())
            .collect()
    }

    /// The nodes on which the service's tasks run, sorted.
    #[must_use]
    pub fn running(&self, service: &str) -> Vec<String> {
        let tasks = self.tasks(service);
        let running = tasks.iter().filter_map(|task| task.split_once("|Running "));
        let mut nodes: Vec<String> = running.map(|(node, _)| node.to_owned()).collect();
        nodes.sort();
        nodes
    }
}

impl Drop for Swarm {
    fn drop(&mut self) {
        // Workers first: a manager that is gone does not order new tasks while they end.
        while let Some(node) = self.nodes.pop() {
            drop(node);
        }
        let _ = Command::new("ip").args(["link", "del", &self.bridge]).output();
    }
}

impl Node {
    fn up(number: usize, bridge: &str, world: World, settings: &dyn Fn(&World) -> Value) -> Self {
        let (name, address) = (format!("node{number}"), format!("10.9.0.{number}"));
        let holder = hold(&name, &world);
        let pid = holder.id().to_string();
        let enter: Vec<String> =
            ["nsenter", "--net", "--uts", "--mount", "--target", &pid].map(str::to_owned).into();
        let link = format!(
            "ip link add {bridge}n{number} type veth peer name eth0 netns {pid} && \
             ip link set {bridge}n{number} master {bridge} up"
        );
        done(Command::new("sh").args(["-c", &link]));
        let inside = format!("ip link set lo up; ip addr add {address}/24 dev eth0; ip link set eth0 up");
        done(Command::new(&enter[0]).args(&enter[1..]).args(["sh", "-c", &inside]));
        let settings = settings(&world);
        let docker = Docker::up_in(world, &settings, enter.clone());
        Self { docker, name, address, enter, holder }
    }

    /// Runs `sublet` on the node.
    #[must_use]
    pub fn sublet(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(&self.enter[0]);
        command
            .args(&self.enter[1..])
            .arg(bin_dir().join("sublet"))
            .args(arguments)
            .env("SUBLET_CONFIG", &self.docker.world.config)
            .env("DOCKER_HOST", format!("unix://{}", self.docker.socket().display()))
            .env("LC_ALL", "C.UTF-8");
        command.stdin(Stdio::null()).output().expect("nsenter runs")
    }

    /// How many of the generic resource `kind` the manager believes the node to have; `None`: it was not told.
    #[must_use]
    pub fn advertised(&self, manager: &Docker, kind: &str) -> Option<u64> {
        let format = "{{json .Description.Resources.GenericResources}}";
        let told = manager.ask(&["node", "inspect", &self.name, "--format", format]);
        let all: Value = serde_json::from_str(&told).expect("JSON");
        let discrete = all.as_array()?.iter().map(|resource| &resource["DiscreteResourceSpec"]);
        discrete.into_iter().find(|spec| spec["Kind"] == kind).and_then(|spec| spec["Value"].as_u64())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // Otherwise its dockerd would start the tasks of its services again.
        let _ = self.docker.cli(&["swarm", "leave", "--force"]);
        self.docker.end_daemon(nix::sys::signal::Signal::SIGTERM);
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// A process with the node's namespaces, in which the world's directory is /etc/docker.
fn hold(name: &str, world: &World) -> Child {
    let script = "hostname \"$1\" && mkdir -p /etc/docker && mount --bind \"$2\" /etc/docker && echo up && \
                  exec sleep infinity";
    let mut holder = Command::new("unshare")
        .args(["--net", "--uts", "--mount", "sh", "-c", script, "sh", name])
        .arg(world.dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("unshare runs");
    let mut line = String::new();
    let stdout = holder.stdout.take().expect("piped");
    BufReader::new(stdout).read_line(&mut line).expect("a line");
    assert_eq!(line, "up\n", "the namespaces of {name}");
    holder
}

fn done(command: &mut Command) {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}
