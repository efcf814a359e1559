//! Containers without root: a real uid, a user namespace, a real runc or crun, and `sublet serve` as root.

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sublet_e2e::{Finished, World, bin_dir, eventually, skip_unless_root};

const HOLD: &[&str] = &["/usr/bin/cuda-probe", "hold", "120"];
const ALICE: u32 = 1000;
const BOB: u32 = 1001;

/// Allows Alice a quarter and 8 GiB twice, and Bob one lease of any kind.
const POLICY: &str = "[[policy]]\nuser = 1000\nmodes = [\"mps\"]\nsm = 50\nmemory = \"16GiB\"\nleases = 2\n\
                      [[policy]]\nuser = 1001\nleases = 1\n";

/// A simulated driver, the service, and programs that everybody may run.
struct Host {
    serve: Option<Child>,
    world: World,
}

impl Host {
    fn new(topology: &str, extra: &str) -> Self {
        let world = World::simulated(topology, extra);
        open_to_all(world.dir.path());
        std::fs::create_dir(world.dir.path().join("bin")).expect("bin");
        for program in ["sublet-runtime", "sublet-hook"] {
            copy(&bin_dir().join(program), &world.dir.path().join("bin").join(program));
        }
        copy(Path::new(env!("CARGO_BIN_EXE_speak")), &world.dir.path().join("bin/speak"));
        Self { serve: None, world }
    }

    fn serving(topology: &str, extra: &str) -> Self {
        let mut host = Self::new(topology, extra);
        host.start();
        host
    }

    fn socket(&self) -> PathBuf {
        self.world.state_dir().join("sublet.sock")
    }

    fn start(&mut self) {
        let serve = self.world.command("sublet").arg("serve").spawn().expect("sublet serve runs");
        self.serve = Some(serve);
        assert!(eventually(|| std::os::unix::net::UnixStream::connect(self.socket()).is_ok()), "no socket");
    }

    fn stop(&mut self) {
        let Some(mut serve) = self.serve.take() else { return };
        let pid = nix::unistd::Pid::from_raw(i32::try_from(serve.id()).expect("a pid"));
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).expect("it runs");
        assert!(serve.wait().expect("it ends").success());
    }

    /// A program of ours, run by `uid`.
    fn command(&self, uid: u32, program: &str) -> Command {
        let mut command = Command::new(self.world.dir.path().join("bin").join(program));
        command.uid(uid).gid(uid).env("SUBLET_CONFIG", &self.world.config).current_dir("/");
        command.env("XDG_RUNTIME_DIR", self.home(uid)).stdin(Stdio::null());
        command
    }

    fn home(&self, uid: u32) -> PathBuf {
        self.world.dir.path().join(format!("home-{uid}"))
    }

    /// What the service answers to `lines` of `uid`'s.
    fn say(&self, uid: u32, lines: &[Value]) -> Vec<Value> {
        let mut command = self.command(uid, "speak");
        let mut child = command
            .arg(self.socket())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("speak runs");
        let mut stdin = child.stdin.take().expect("piped");
        lines.iter().for_each(|line| writeln!(stdin, "{line}").expect("it listens"));
        drop(stdin);
        let output = child.wait_with_output().expect("it ends");
        let text = String::from_utf8(output.stdout).expect("UTF-8");
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Holds `count` connections as `uid`.
    fn hold(&self, uid: u32, how: &str, count: usize) -> Holder {
        let mut command = self.command(uid, "speak");
        let command = command.arg(self.socket()).args([how, &count.to_string()]);
        Holder(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("speak runs"))
    }

    /// A bundle of `uid`'s as a rootless engine makes it: uid 0 in a user namespace of its own.
    fn bundle(&self, uid: u32, id: &str, annotations: &[(&str, &str)], args: &[&str]) -> Bundle<'_> {
        let mut spec = self.world.bundle(id, annotations, args).spec;
        let dir = self.home(uid).join(id);
        std::fs::create_dir_all(&dir).expect("bundle");
        let from = self.world.dir.path().join("rootfs");
        run("cp", &["-a", text(&from), text(&dir.join("rootfs"))]);
        run("chown", &["-R", &format!("{uid}:{uid}"), text(&self.home(uid))]);
        let linux = spec["linux"].as_object_mut().expect("linux");
        linux.remove("cgroupsPath");
        linux.remove("resources");
        linux["namespaces"].as_array_mut().expect("namespaces").push(json!({"type": "user"}));
        let map = json!([{"containerID": 0, "hostID": uid, "size": 1}]);
        linux.insert("uidMappings".into(), map);
        linux.insert("gidMappings".into(), json!([{"containerID": 0, "hostID": uid, "size": 1}]));
        let mounts = spec["mounts"].as_array_mut().expect("mounts");
        mounts.retain(|mount| mount["destination"] != "/sys");
        Bundle { host: self, uid, id: id.to_owned(), dir, spec }
    }

    fn leases(&self) -> Vec<Value> {
        self.world.leases()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(mut serve) = self.serve.take() {
            let _ = serve.kill();
            let _ = serve.wait();
        }
    }
}

/// A client that holds connections open, until it is dropped.
struct Holder(Child);

impl Holder {
    /// How many connections were turned away, and the words of the first.
    fn turned_away(&mut self) -> (usize, String) {
        let mut lines = BufReader::new(self.0.stdout.take().expect("piped")).lines();
        let count = lines.next().expect("a line").expect("a line").parse().expect("a number");
        let words = if count > 0 { lines.next().expect("a line").expect("a line") } else { String::new() };
        (count, words)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A container of a user's; removed however its test ends.
struct Bundle<'a> {
    host: &'a Host,
    uid: u32,
    id: String,
    dir: PathBuf,
    spec: Value,
}

impl Bundle<'_> {
    fn runtime(&self, arguments: &[&str]) -> Finished {
        let mut command = self.host.command(self.uid, "sublet-runtime");
        command.arg("--root").arg(self.dir.join("state")).args(arguments);
        let open = |name: &str| std::fs::File::create(self.dir.join(name)).expect("output file");
        let kind = arguments[0];
        let (out, err) = (format!("{kind}.out"), format!("{kind}.err"));
        let status = command.stdout(open(&out)).stderr(open(&err)).status().expect("it runs");
        let read = |name: &str| std::fs::read_to_string(self.dir.join(name)).unwrap_or_default();
        Finished { ok: status.success(), code: status.code(), stdout: read(&out), stderr: read(&err) }
    }

    fn write(&self) {
        let file = self.dir.join("config.json");
        std::fs::write(&file, self.spec.to_string()).expect("config.json");
        std::os::unix::fs::chown(&file, Some(self.uid), Some(self.uid)).expect("chown");
    }

    fn create(&self) -> Finished {
        self.write();
        self.runtime(&["create", "--bundle", text(&self.dir), &self.id])
    }

    fn up(&self) {
        let created = self.create();
        assert!(created.ok, "create {}: {}", self.id, created.stderr);
        let started = self.runtime(&["start", &self.id]);
        assert!(started.ok, "start {}: {}", self.id, started.stderr);
    }

    fn down(&self) {
        let deleted = self.runtime(&["delete", "--force", &self.id]);
        assert!(deleted.ok, "delete {}: {}", self.id, deleted.stderr);
    }

    /// The first line of that event on the container's own output.
    fn event(&self, event: &str) -> Value {
        let mut found = None;
        let heard = eventually(|| {
            let output = std::fs::read_to_string(self.dir.join("create.out")).unwrap_or_default();
            let mut lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            found = lines.find(|line| line["event"] == event);
            found.is_some()
        });
        assert!(heard, "container {} printed no {event}", self.id);
        found.unwrap_or_default()
    }

    fn config(&self) -> Value {
        let text = std::fs::read(self.dir.join("config.json")).expect("config.json");
        serde_json::from_slice(&text).expect("JSON")
    }

    fn pid(&self) -> i32 {
        let state: Value = serde_json::from_str(&self.runtime(&["state", &self.id]).stdout).expect("JSON");
        i32::try_from(state["pid"].as_i64().expect("pid")).expect("pid")
    }
}

impl Drop for Bundle<'_> {
    fn drop(&mut self) {
        let _ = self.runtime(&["delete", "--force", &self.id]);
    }
}

fn open_to_all(path: &Path) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).expect("chmod");
}

fn copy(from: &Path, to: &Path) {
    std::fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    open_to_all(to);
}

fn run(program: &str, args: &[&str]) {
    let status = Command::new(program).args(args).status().expect("it runs");
    assert!(status.success(), "{program} {args:?}");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

const QUARTER: &[(&str, &str)] = &[("sublet.sm", "25"), ("sublet.memory", "8GiB")];

#[test]
fn a_user_takes_a_share_sees_it_and_gives_it_back() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let info = bundle.event("info");
    assert_eq!(
        (&info["error"], &info["mps"], &info["sm"]),
        (&Value::Null, &json!(true), &json!(32)),
        "{info}"
    );
    let lease = &host.leases()[0];
    assert_eq!((&lease["state"], &lease["sm_percent"]), (&json!("active"), &json!(25.0)));
    assert_eq!((&lease["memory_bytes"], &lease["pid"]), (&json!(8_589_934_592_u64), &json!(bundle.pid())));
    // An exec'd process, as dockerd does it: none of config.json's environment.
    let process = json!({"cwd": "/", "args": ["/usr/bin/cuda-probe", "info"], "env": ["PATH=/usr/bin"],
        "user": {"uid": 0, "gid": 0}});
    let file = bundle.dir.join("process.json");
    std::fs::write(&file, process.to_string()).expect("process.json");
    std::os::unix::fs::chown(&file, Some(ALICE), Some(ALICE)).expect("chown");
    let exec = bundle.runtime(&["exec", "--process", text(&file), "mine"]);
    assert!(exec.ok, "{exec:?}");
    let info = &exec.json()[0];
    assert_eq!((&info["mps"], &info["sm"]), (&json!(true), &json!(32)), "{exec:?}");
    bundle.down();
    host.world.assert_empty();
    let made = bundle.dir.join("rootfs/usr/lib/x86_64-linux-gnu/libcuda.so.1");
    assert!(!made.exists(), "a mount point is left");
}

#[test]
fn run_frees_its_share_by_itself() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let bundle = host.bundle(ALICE, "ran", QUARTER, &["/usr/bin/cuda-probe", "info"]);
    bundle.write();
    let ran = bundle.runtime(&["run", "--bundle", text(&bundle.dir), "ran"]);
    assert!(ran.ok, "{ran:?}");
    assert_eq!(ran.json()[0]["sm"], json!(32));
    host.world.assert_empty();
}

#[test]
fn without_the_service_a_container_is_refused_and_untouched() {
    if skip_unless_root() {
        return;
    }
    let host = Host::new("h200", POLICY);
    let bundle = host.bundle(ALICE, "alone", QUARTER, HOLD);
    let refused = bundle.create();
    assert!(!refused.ok);
    let line = "sublet serve is not running";
    assert!(refused.stderr.contains(line) && refused.stderr.contains("systemctl enable --now sublet.socket"));
    assert_eq!(bundle.config(), bundle.spec);
    // One that is not ours does not need it.
    let plain = host.bundle(ALICE, "plain", &[], &["/bin/true"]);
    plain.up();
    plain.down();
}

#[test]
fn policy_says_who_may_take_what() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200x8", POLICY);
    let refusal = |uid, id: &str, annotations: &[(&str, &str)]| {
        let bundle = host.bundle(uid, id, annotations, HOLD);
        let refused = bundle.create();
        assert!(!refused.ok, "{annotations:?}");
        assert_eq!(bundle.config(), bundle.spec);
        refused.stderr
    };
    let stranger = refusal(4321, "stranger", QUARTER);
    assert!(stranger.contains("policy = [{ user = 4321, leases = 1 }]"), "{stranger}");
    let slice = refusal(ALICE, "slice", &[("sublet.mode", "time-slice"), ("sublet.memory", "1GiB")]);
    assert!(slice.contains("allows sublet.mode mps, and this is time-slice"), "{slice}");
    let unlimited = refusal(ALICE, "unlimited", &[("sublet.sm", "25")]);
    assert!(unlimited.contains("caps memory at 16384 MiB: name your part with sublet.memory"), "{unlimited}");
    let large = refusal(ALICE, "large", &[("sublet.sm", "60"), ("sublet.memory", "1GiB")]);
    assert!(large.contains("caps sm at 50 %, your containers hold 0 % and this asks for 60 %"), "{large}");
    let bundle = host.bundle(BOB, "one", &[("sublet.gpu", "3")], HOLD);
    bundle.up();
    let second = refusal(BOB, "two", &[("sublet.gpu", "4")]);
    assert!(second.contains("allows 1 leases at once"), "{second}");
    // A policy holds from the moment it is written.
    host.world.configure("[[policy]]\nuser = 4321\ndevices = [\"5\"]\n");
    let allowed = host.bundle(4321, "allowed", &[("sublet.gpu", "any")], HOLD);
    allowed.up();
    let wrong = refusal(4321, "wrong", &[("sublet.gpu", "0")]);
    assert!(wrong.contains("no GPU here is 0") || wrong.contains("no place"), "{wrong}");
    let uuid = host.world.status()["devices"][5]["uuid"].clone();
    assert!(host.leases().iter().any(|lease| lease["container_id"] == "allowed" && lease["device"] == uuid));
    bundle.down();
    allowed.down();
    host.world.assert_empty();
    let last = host.world.sublet(&["status", "--last-error"]);
    assert!(String::from_utf8_lossy(&last.stdout).contains("container wrong:"));
}

#[test]
fn nobody_acts_on_what_is_somebody_elses() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let bundle = host.bundle(ALICE, "mine", QUARTER, HOLD);
    bundle.up();
    let lease = host.leases()[0]["id"].clone();
    let alices = bundle.pid();
    // Bob knows Alice's lease, as everybody does, and her container's process.
    let container = json!({"id": "mine", "bundle": bundle.dir, "record": bundle.dir.join("state/mine")});
    let record = bundle.dir.join("state/mine");
    let asks = [
        json!({"v": 1, "do": "bind", "lease": lease, "container": container, "pid": alices}),
        json!({"v": 1, "do": "hand-over", "lease": lease, "owner": alices}),
        json!({"v": 1, "do": "unmark", "lease": lease}),
        json!({"v": 1, "do": "end", "lease": lease}),
        json!({"v": 1, "do": "withdraw", "lease": lease}),
    ];
    for answer in host.say(BOB, &asks) {
        let reason = answer["refused"]["reason"].as_str().unwrap_or_default();
        assert!(reason.contains("is held by you"), "{answer}");
    }
    let asks = [
        json!({"v": 1, "do": "ending", "id": "mine", "record": record}),
        json!({"v": 1, "do": "exec-environment", "id": "mine", "record": record}),
    ];
    let answers = host.say(BOB, &asks);
    assert_eq!((&answers[0]["lease"], &answers[1]["environment"]), (&Value::Null, &Value::Null));
    assert_eq!(host.leases()[0]["state"], "active");

    // Processes that are not Bob's: Alice's container, root's first process, none.
    let admit = |owner: i32| {
        json!({"v": 1, "do": "admit", "container": {"id": "b", "bundle": "/b", "rootfs": "/b/r", "record": "/r/b"},
            "owner": owner, "annotations": {"sublet.gpu": "0", "sublet.mode": "mps"}, "image":
            {"library_dir": null, "nix": false, "tmp_is_host": false, "created": [], "warnings": []}})
    };
    // (Where not even root may look at the first process, that is the reason.)
    for (owner, why) in [(alices, "is not uid 1001's"), (1, "process 1 "), (-1, "there is no process")] {
        let answer = &host.say(BOB, &[admit(owner)])[0];
        assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains(why), "{answer}");
    }
    // His own lease cannot be bound to her process either, and it ends with his.
    let mut speaking = host.command(BOB, "speak");
    let mut speaking =
        speaking.arg(host.socket()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it runs");
    let mut answers = BufReader::new(speaking.stdout.take().expect("piped"));
    let mut ask = |line: &Value| {
        writeln!(speaking.stdin.as_mut().expect("piped"), "{line}").expect("it listens");
        let mut answer = String::new();
        answers.read_line(&mut answer).expect("an answer");
        serde_json::from_str::<Value>(&answer).expect("JSON")
    };
    let mut own = admit(0);
    own["owner"] = Value::Null;
    let bobs = ask(&own)["granted"]["lease"].clone();
    assert!(bobs.is_string());
    let bind = |pid: i32| json!({"v": 1, "do": "bind", "lease": bobs, "container": {"id": "b"}, "pid": pid});
    for pid in [alices, 1] {
        let answer = ask(&bind(pid));
        let reason = answer["refused"]["reason"].as_str().unwrap_or_default();
        assert!(
            reason.contains("cannot be bound") && reason.contains(&format!("process {pid} ")),
            "{answer}"
        );
    }
    assert_eq!(host.leases().len(), 2);
    drop(speaking.stdin.take());
    speaking.wait().expect("it ends");
    assert!(eventually(|| host.leases().len() == 1), "the lease of a client that is gone");
    // The owner may not free what still runs, nor does saying so end it.
    let end = json!({"v": 1, "do": "withdraw", "lease": lease});
    let answer = &host.say(ALICE, &[end])[0];
    assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains("still run"), "{answer}");
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn no_path_of_a_users_is_opened_by_root() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let precious = host.world.dir.path().join("precious");
    std::fs::create_dir(&precious).expect("directory");
    std::fs::write(precious.join("empty"), "").expect("file");
    std::fs::write(precious.join(".x.999999999.tmp"), "").expect("file");
    let admit = json!({"v": 1, "do": "admit", "container":
        {"id": "b", "bundle": precious, "rootfs": precious, "record": precious},
        "annotations": {"sublet.gpu": "0"}, "image":
        {"library_dir": null, "nix": false, "tmp_is_host": false, "created": ["/empty"], "warnings": []}});
    let answer = &host.say(BOB, &[admit])[0];
    assert!(answer["granted"]["lease"].is_string(), "{answer}");
    // Its owner is gone: the next command frees it and would clear what it left.
    assert!(eventually(|| host.leases().is_empty()));
    assert!(host.world.sublet(&["gc"]).status.success());
    assert!(precious.join("empty").exists() && precious.join(".x.999999999.tmp").exists());
    host.world.assert_empty();
}

#[test]
fn a_lease_whose_container_never_came_to_be_is_given_back() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let mut bundle = host.bundle(ALICE, "broken", QUARTER, HOLD);
    bundle.spec["process"]["args"] = json!(["/no/such/program"]);
    bundle.spec["hooks"] = json!({"createRuntime": [{"path": "/bin/false"}]});
    assert!(!bundle.create().ok);
    assert!(eventually(|| host.leases().is_empty()));
    host.world.assert_empty();
}

#[test]
fn bad_lines_are_answered_and_the_next_one_too() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let status = json!({"v": 1, "do": "status"});
    let asks =
        [json!({}), json!({"v": 2, "do": "status"}), json!({"v": 1, "do": "admit"}), json!([]), status];
    let answers = host.say(ALICE, &asks);
    assert_eq!(answers.len(), 5);
    assert!(answers[..4].iter().all(|answer| answer["refused"]["reason"].is_string()), "{answers:?}");
    assert!(answers[1]["refused"]["reason"].as_str().unwrap_or_default().contains("version 2"));
    assert_eq!((&answers[4]["status"]["uid"], &answers[4]["status"]["leases"]), (&json!(ALICE), &json!([])));
    let long = json!({"v": 1, "do": "status", "x": "x".repeat(70_000)});
    let answer = &host.say(ALICE, &[long])[0];
    assert!(answer["refused"]["reason"].as_str().unwrap_or_default().contains("64 KiB"), "{answer}");
}

#[test]
fn the_service_restarts_under_running_containers() {
    if skip_unless_root() {
        return;
    }
    let mut host = Host::serving("h200", POLICY);
    {
        let bundle = host.bundle(ALICE, "kept", QUARTER, &["/usr/bin/cuda-probe", "hold", "120"]);
        bundle.up();
        bundle.event("info");
        std::mem::forget(bundle);
    }
    host.stop();
    assert!(!host.socket().exists());
    assert_eq!(host.leases()[0]["state"], "active");
    // Killed, not ended: the socket that it leaves is no obstacle.
    host.start();
    let mut killed = host.serve.take().expect("it runs");
    killed.kill().and_then(|()| killed.wait().map(drop)).expect("it ends");
    host.start();
    let dir = host.home(ALICE).join("kept");
    let bundle = Bundle { host: &host, uid: ALICE, id: "kept".into(), dir, spec: Value::Null };
    let exec = bundle.runtime(&["exec", "--env", "A=b", "kept", "/usr/bin/cuda-probe", "info"]);
    assert_eq!(exec.json()[0]["sm"], json!(32), "{exec:?}");
    bundle.down();
    host.world.assert_empty();
}

#[test]
fn a_crashed_container_is_freed_by_the_service_alone() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let bundle = host.bundle(ALICE, "crashed", QUARTER, HOLD);
    bundle.up();
    bundle.event("info");
    run("kill", &["-9", &bundle.pid().to_string()]);
    let ledger = host.world.state_dir().join("ledger.json");
    let begun = Instant::now();
    let freed = || !std::fs::read_to_string(&ledger).unwrap_or_default().contains("crashed");
    while !freed() && begun.elapsed() < Duration::from_secs(25) {
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(freed(), "no command of ours has run, and ten seconds are over");
}

#[test]
fn systemd_is_told_and_its_socket_is_taken() {
    if skip_unless_root() || !Path::new("/usr/bin/systemd-socket-activate").exists() {
        return;
    }
    let host = Host::new("h200", POLICY);
    let notify = UnixDatagram::bind(host.world.dir.path().join("notify")).expect("a socket");
    notify.set_read_timeout(Some(Duration::from_secs(10))).expect("a limit");
    std::fs::create_dir_all(host.world.state_dir()).expect("state directory");
    let mut command = Command::new("systemd-socket-activate");
    command.arg("--listen").arg(host.socket()).arg("--setenv=NOTIFY_SOCKET").arg("--setenv=SUBLET_CONFIG");
    command.arg("--setenv=WATCHDOG_USEC").arg(bin_dir().join("sublet")).arg("serve");
    command.env("NOTIFY_SOCKET", host.world.dir.path().join("notify")).env("WATCHDOG_USEC", "2000000");
    let mut child = command.env("SUBLET_CONFIG", &host.world.config).spawn().expect("it runs");
    assert!(eventually(|| host.socket().exists()));
    std::fs::set_permissions(host.socket(), std::fs::Permissions::from_mode(0o666)).expect("chmod");
    let answers = host.say(ALICE, &[json!({"v": 1, "do": "status"})]);
    assert_eq!(answers[0]["status"]["uid"], json!(ALICE));
    let mut heard = Vec::new();
    let mut buffer = [0; 64];
    while heard.len() < 3 {
        let length = notify.recv(&mut buffer).expect("a word in time");
        heard.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
    }
    assert_eq!(heard, ["READY=1", "WATCHDOG=1", "WATCHDOG=1"]);
    run("kill", &["-TERM", &child.id().to_string()]);
    assert!(child.wait().expect("it ends").success());
    assert!(host.socket().exists(), "systemd's socket is systemd's to remove");
}

#[test]
fn one_uid_holds_sixteen_connections() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let mut held = host.hold(ALICE, "hold", 20);
    let (turned_away, words) = held.turned_away();
    assert_eq!(turned_away, 4);
    assert!(words.contains("uid 1000 holds 16 connections to sublet serve already"), "{words}");
    // Others are let in, and so is she once those hang for a second.
    assert_eq!(host.say(BOB, &[json!({"v": 1, "do": "status"})])[0]["status"]["uid"], json!(BOB));
    let bundle = host.bundle(ALICE, "all-the-same", QUARTER, HOLD);
    bundle.up();
    bundle.down();
    drop(held);
    host.world.assert_empty();
}

/// Numbers for people: `cargo test -p sublet-e2e --test serve -- --nocapture hanging`.
#[test]
fn hanging_connections_hold_nobody() {
    if skip_unless_root() {
        return;
    }
    let host = Host::serving("h200", POLICY);
    let cycle = |id: &str, annotations: &[(&str, &str)]| {
        let bundle = host.bundle(ALICE, id, annotations, &["/bin/true"]);
        let begun = Instant::now();
        let created = bundle.create();
        let took = begun.elapsed();
        assert!(created.ok, "{}", created.stderr);
        bundle.down();
        took
    };
    // Beside each, one that does not ask the service: what else the machine does shows in both.
    let medians = |name: &str| {
        let rounds = 0..9;
        let pairs = rounds.map(|round| {
            (cycle(&format!("{name}-{round}"), QUARTER), cycle(&format!("plain-{name}-{round}"), &[]))
        });
        let (mut ours, mut plain): (Vec<_>, Vec<_>) = pairs.unzip();
        ours.sort();
        plain.sort();
        (ours[4], plain[4])
    };
    // Keeps the daemon running: what is measured is the service.
    let warm = host.bundle(BOB, "warm", &[("sublet.mode", "mps")], HOLD);
    warm.up();
    let idle = medians("idle");
    // A thousand of 63 other users, one of which sends a byte a second, and sixteen of Alice's own.
    let mut holders: Vec<Holder> = (0..63).map(|user| host.hold(20_000 + user, "hold", 16)).collect();
    holders.push(host.hold(19_999, "drip", 1));
    holders.push(host.hold(ALICE, "hold", 16));
    holders.iter_mut().for_each(|holder| assert_eq!(holder.turned_away().0, 0));
    let pid = host.serve.as_ref().expect("it runs").id();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("/proc").count();
    let hanging = medians("hanging");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("/proc");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("VmHWM");
    let kib: u64 = peak.trim().trim_end_matches("kB").trim().parse().expect("a number");
    println!(
        "create without root (beside it one without a share), medians of 9: idle {idle:?}, with {open} descriptors open in serve {hanging:?}; \
         serve's peak {kib} KiB"
    );
    assert!(open > 1000, "{open}");
    assert!(kib < 32 << 10, "serve took {kib} KiB");
    drop(holders);
    warm.down();
    host.world.assert_empty();
}
