//! What `sublet metrics` prints, read by those for whom it is: `prometheus_client`'s `OpenMetrics` parser, promtool,
//! and Debian's Prometheus, which also evaluates the rules and the dashboard's queries of config/grafana. Runs in the
//! root `prometheus` of tests/engines/root.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use sublet_e2e::web::Web;
use sublet_e2e::{World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const PARSE: &str = "import sys\nfrom prometheus_client.openmetrics.parser import text_string_to_metric_families\n\
    for family in text_string_to_metric_families(sys.stdin.read()):\n    print(family.name, family.type, len(family.samples))";

const VALIDATE: &str = "import json, sys, jsonschema\n\
    jsonschema.validate(*(json.load(open(file)) for file in sys.argv[1:]))";

fn checkout(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file)
}

fn rules() -> PathBuf {
    checkout("config/grafana/alerts.yml")
}

/// The queries of the dashboard, as Grafana sends them with all hosts chosen.
fn queries() -> Vec<String> {
    let text = std::fs::read(checkout("config/grafana/sublet.json")).expect("read");
    let dashboard: Value = serde_json::from_slice(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let queries = targets.map(|target| target["expr"].as_str().expect("an expression"));
    queries.map(|query| query.replace("$instance", ".*").replace("$__rate_interval", "1m")).collect()
}

/// The program's output; it must succeed.
fn done(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn from(file: &Path) -> Stdio {
    std::fs::File::open(file).expect("opened").into()
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn both_formats_are_read_and_prometheus_answers_what_the_rules_ask() {
    if skip_unless_root() {
        return;
    }
    let has_promtool = Command::new("promtool").arg("--version").output().is_ok();
    assert!(has_promtool, "this test runs in the root `prometheus` (make test-metrics)");
    let world = World::simulated("h200", "");
    let keep = ["/usr/bin/cuda-probe", "keep", "256", "600"];
    let suspended = world.bundle("suspended", &[("sublet.suspend", "allow")], &keep);
    suspended.up();
    suspended.event("round");
    for command in ["suspend", "resume", "suspend"] {
        done(world.command("sublet").args([command, "suspended"]));
    }
    let bundle = world.bundle("scraped", &[("sublet.sm", "60"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let _ = world.status();
    let _ = world.bundle("greedy", &[("sublet.sm", "60")], HOLD).refused();
    let served = world.dir.path().join("served");
    std::fs::create_dir(&served).expect("made");
    let write = |name: &str, format: &str| {
        let file = served.join(name);
        let path = file.to_str().expect("UTF-8").to_owned();
        let output = world.sublet(&["metrics", "--format", format, "--output", &path]);
        assert!(output.status.success(), "{output:?}");
        file
    };
    let (open, old) = (write("metrics.om", "openmetrics"), write("metrics", "prometheus"));
    let families = done(Command::new("python3").args(["-c", PARSE]).stdin(from(&open)));
    assert!(families.contains("sublet_refusals counter ") && families.contains("histogram"), "{families}");
    assert_eq!(done(Command::new("promtool").args(["check", "metrics"]).stdin(from(&old))), "");
    assert!(done(Command::new("promtool").args(["check", "rules"]).arg(rules())).contains("SUCCESS"));
    let firing = checkout("tests/metrics/alerts_test.yml");
    assert!(done(Command::new("promtool").args(["test", "rules"]).arg(firing)).contains("SUCCESS"));
    let dashboard = [checkout("config/grafana/sublet.json"), checkout("tests/metrics/dashboard.schema.json")];
    assert_eq!(done(Command::new("python3").args(["-c", VALIDATE]).args(dashboard)), "");

    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .and_then(|socket| socket.local_addr())
        .expect("a port")
        .port();
    let web = Web::metrics(world.command("sublet"));
    let config = format!(
        "global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{}]\nscrape_configs:\n  - job_name: sublet\n    \
         static_configs: [{{targets: ['{}']}}]\n",
        rules().display(),
        web.address
    );
    let file = world.dir.path().join("prometheus.yml");
    std::fs::write(&file, config).expect("written");
    let mut prometheus = Command::new("prometheus");
    prometheus.arg(format!("--config.file={}", file.display()));
    prometheus.arg(format!("--storage.tsdb.path={}", world.dir.path().join("tsdb").display()));
    prometheus.arg(format!("--web.listen-address=127.0.0.1:{port}")).stderr(Stdio::null());
    let _prometheus = Ended(prometheus.spawn().expect("it runs"));
    let address = format!("http://127.0.0.1:{port}");
    let ask = |query: &str| {
        let output =
            Command::new("promtool").args(["query", "instant", &address, query]).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(eventually(|| ask("sublet_up").contains("=> 1 ")), "{}", ask("sublet_up"));
    assert!(
        ask("sublet_container_memory_used_bytes / sublet_container_memory_limit_bytes").contains("scraped")
    );
    assert!(ask("sublet_refusals_total").contains("reason=\"no-room\""));
    // The guard is off although there is a lease: the rule waits for five minutes.
    assert!(eventually(|| ask("ALERTS").contains("SubletGuardOff")), "{}", ask("ALERTS"));
    let text = std::fs::read_to_string(rules()).expect("read");
    let expressions: Vec<&str> = text.lines().filter_map(|line| line.trim().strip_prefix("expr: ")).collect();
    assert!(expressions.len() >= 6);
    for expression in expressions {
        let asked = Command::new("promtool").args(["query", "instant", &address, expression]).status();
        assert!(asked.is_ok_and(|status| status.success()), "{expression}");
    }
    let queries = queries();
    assert!(queries.len() >= 23, "{queries:?}");
    // The driver reports no load of a shared MPS server's clients, and one GPU has nowhere to move them.
    let unknown = ["sublet_container_busy_ratio", "sublet_last_move_seconds"];
    for query in queries.iter().filter(|query| !unknown.iter().any(|metric| query.contains(metric))) {
        assert!(eventually(|| ask(query).contains("=> ")), "no data: {query}");
    }
    for query in &queries {
        let asked = Command::new("promtool").args(["query", "instant", &address, query]).status();
        assert!(asked.is_ok_and(|status| status.success()), "{query}");
    }
    bundle.down();
    suspended.down();
    world.assert_empty();
}
