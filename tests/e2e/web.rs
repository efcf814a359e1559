//! `sublet top --web` as a client sees it: the token, the names it answers to, what it refuses, slow clients, and
//! addresses that it cannot use. tests/web opens the page in a browser.

use crate::two_users;
use std::io::Write as _;
use std::process::Output;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use sublet_e2e::web::{Web, status};
use sublet_e2e::{World, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];

fn data(web: &Web) -> Value {
    let (status, body) = web.get("/data.json");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

#[test]
fn the_page_is_there_for_those_who_have_its_url_and_nothing_can_be_sent() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("shown", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let mut web = Web::start(world.command("sublet"), &[]);
    let (code, html) = web.get("/");
    assert!(code == 200 && html.contains("page.js") && !html.contains("shown"), "{html}");
    assert!(eventually(|| data(&web)["containers"][0]["busy"] == "n/a of 100 %"), "{}", data(&web));
    let shown = data(&web);
    assert_eq!((&shown["containers"][0]["name"], &shown["simulated"]), (&"shown".into(), &true.into()));
    assert!(shown["warnings"][0].as_str().is_some_and(|line| line.starts_with("GUARD OFF")), "{shown}");

    let host = &web.address;
    let ask = |line: &str, host: &str, more: &str| {
        let line = line.replace("TOKEN", &web.token);
        web.send(&format!("{line} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n"))
    };
    let right = ask("GET /TOKEN/", host, "");
    for header in [
        "Content-Security-Policy: default-src 'none'; script-src 'self'; ",
        "Referrer-Policy: no-referrer",
        "Cache-Control: no-store",
        "X-Frame-Options: DENY",
    ] {
        assert!(right.contains(header), "{right}");
    }
    let wrong = format!("GET /{}/data.json", "0".repeat(32));
    for line in ["GET /", "GET /data.json", "GET //TOKEN/", "GET /TOKEN", "GET /TOKEN/../x", &wrong] {
        let answer = ask(line, host, "");
        assert!(status(&answer) == 404 && !answer.contains("shown"), "{line}: {answer}");
    }
    assert_eq!(status(&ask("GET /TOKEN/", "evil.example", "")), 421);
    assert_eq!(status(&ask("GET /TOKEN/", "localhost:1", "")), 200);
    for method in ["POST", "PUT", "DELETE", "OPTIONS"] {
        assert_eq!(status(&ask(&format!("{method} /TOKEN/"), host, "")), 405);
    }
    assert_eq!(status(&ask("GET /TOKEN/", host, "Content-Length: 1\r\n")), 413);
    assert_eq!(status(&ask("GET /TOKEN/", host, &format!("X: {}\r\n", "x".repeat(8192)))), 431);
    let head = ask("HEAD /TOKEN/", host, "");
    assert!(status(&head) == 200 && head.ends_with("\r\n\r\n"), "{head}");
    assert!(web.ended(Signal::SIGINT).success());
    bundle.down();
    world.assert_empty();
}

/// Whether the program has NVML open.
fn has_nvml(web: &Web) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", web.pid())).expect("it runs");
    maps.contains("libnvidia-ml")
}

#[test]
fn the_host_is_looked_at_only_while_somebody_asks_and_what_cannot_be_read_is_said() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let web = Web::start(world.command("sublet"), &["--interval", "500ms"]);
    sleep(Duration::from_secs(1));
    assert!(!has_nvml(&web), "nobody has asked yet");
    let _ = data(&web);
    assert!(has_nvml(&web));
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    // 15 is NVML_ERROR_GPU_IS_LOST.
    std::fs::write(&fail, "nvmlDeviceGetMemoryInfo_v2 0 15\nnvmlDeviceGetMemoryInfo 0 15\n")
        .expect("written");
    let is_said =
        |shown: &Value| shown["gpus"][0]["fault"].as_str().is_some_and(|why| why.contains("not known"));
    assert!(eventually(|| is_said(&data(&web))), "{}", data(&web));
    let shown = data(&web);
    assert!(
        shown["gpus"][0]["memory"]["used"].is_null() && shown["warnings"].to_string().contains("GPU 0: ")
    );
    std::fs::remove_file(&fail).expect("removed");
    assert!(eventually(|| data(&web)["gpus"][0]["fault"].is_null()), "{}", data(&web));
    assert!(eventually(|| !has_nvml(&web)), "it is closed when nobody has asked for a while");
    let again = data(&web);
    assert!(again["age_seconds"].as_u64().is_some_and(|age| age < 3), "{again}");
}

#[test]
fn slow_clients_keep_nobody_out_for_long() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let web = Web::start(world.command("sublet"), &[]);
    let _ = data(&web);
    // One sends a byte at a time, one never reads, and more than can be served at once send nothing.
    let began = Instant::now();
    let mut slow = web.connect();
    let mut deaf = web.connect();
    let request = format!("GET /{}/data.json HTTP/1.1\r\nHost: localhost\r\n\r\n", web.token);
    deaf.write_all(request.as_bytes()).expect("sent");
    let idle: Vec<_> = (0..38).map(|_| web.connect()).collect();
    let _ = data(&web);
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    drop(idle);
    while slow.write_all(b"G").is_ok() {
        assert!(began.elapsed() < Duration::from_secs(30), "it is still listened to");
        sleep(Duration::from_millis(200));
    }
    let began = Instant::now();
    let _ = data(&web);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[test]
fn a_name_can_be_permitted_and_an_address_that_cannot_be_used_is_explained() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let web = Web::start(world.command("sublet"), &["--web-name", "gpu.example"]);
    let named = format!("GET /{}/ HTTP/1.1\r\nHost: gpu.example:80\r\n\r\n", web.token);
    assert_eq!(status(&web.send(&named)), 200);
    let said = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let taken = world.sublet(&["top", "--web", &web.address]);
    assert!(!taken.status.success() && said(&taken).contains("another program listens there"), "{taken:?}");
    let open = world.sublet(&["top", "--web", "0.0.0.0:0"]);
    assert!(!open.status.success() && said(&open).contains("--web-public"), "{open:?}");
    let both = world.sublet(&["top", "--once", "--web", "127.0.0.1:0"]);
    assert_eq!(both.status.code(), Some(2));
    let no_port = world.sublet(&["top", "--web", "localhost"]);
    assert_eq!(no_port.status.code(), Some(2));
}

#[test]
fn a_user_without_root_sees_what_status_shows_them() {
    if skip_unless_root() {
        return;
    }
    let mut host = two_users::host("h200");
    host.start();
    let bundle = host.world.bundle("roots", &[("sublet.sm", "25"), ("sublet.memory", "8GiB")], HOLD);
    bundle.up();
    bundle.event("info");
    let web = Web::start(host.command(two_users::ALICE, "sublet"), &[]);
    assert!(eventually(|| data(&web)["containers"][0]["name"] == "roots"), "{}", data(&web));
    drop(web);
    bundle.down();
}

#[test]
fn scrapers_get_the_metrics_in_the_format_that_they_ask_for() {
    if skip_unless_root() {
        return;
    }
    let world = World::simulated("h200", "");
    let bundle = world.bundle("scraped", &[("sublet.sm", "25")], HOLD);
    bundle.up();
    bundle.event("info");
    let web = Web::metrics(world.command("sublet"));
    let ask = |method: &str, path: &str, more: &str| {
        web.send(&format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n{more}\r\n", web.address))
    };
    let plain = ask("GET", "/metrics", "");
    assert!(plain.contains("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"), "{plain}");
    assert!(plain.contains("\nsublet_up 1\n") && plain.contains("container=\"scraped\""), "{plain}");
    assert!(!plain.contains("# EOF"), "{plain}");
    // The header that Prometheus sends.
    let accept =
        "Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.4\r\n";
    let open = ask("GET", "/metrics", accept);
    let content_type = "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    assert!(open.contains(content_type) && open.ends_with("# EOF\n"), "{open}");
    assert_eq!(status(&ask("GET", "/", "")), 404);
    assert_eq!(status(&ask("POST", "/metrics", "")), 405);
    assert_eq!(status(&web.send("GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n")), 421);
    let told = |arguments: &[&str]| {
        let output = world.sublet(arguments);
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(told(&["metrics", "--listen", &web.address]).contains("another program listens there"));
    assert!(told(&["metrics", "--listen", "0.0.0.0:0"]).contains("--listen-public"));
    assert!(told(&["metrics", "--listen", "localhost:1"]).contains("127.0.0.1:9843"));
    assert!(told(&["metrics", "--listen", "systemd"]).contains("sublet-metrics-http.socket"));
    // The processes are no longer reported while NVML fails, and the rest is.
    let fail = world.driver_root.as_ref().expect("simulated").join("sim/fail");
    std::fs::write(&fail, "nvmlInit_v2 0 999\n").expect("written");
    let without = || ask("GET", "/metrics", "");
    assert!(eventually(|| !without().contains("sublet_gpu_memory_used_bytes{")), "{}", without());
    assert!(without().contains("\nsublet_up 1\n") && without().contains("sublet_gpu_memory_booked_bytes{"));
    std::fs::remove_file(&fail).expect("removed");
    bundle.down();
    let is_gone = || !ask("GET", "/metrics", "").contains("container=\"scraped\"");
    assert!(eventually(is_gone), "a container that is gone leaves");
    world.assert_empty();
}
