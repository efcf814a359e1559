// Asks the server for the state of the host again and again, and puts it into the page. Names are put in as text alone.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
// How long an answer may take, in milliseconds.
const PATIENCE = 8000;
// A look older than this, in seconds, is said to be old.
const OLD = 5;

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
let timer = 0;
let running = false;
let answered = 0;

function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
}

// Text that did not change is left alone: it may be selected, and screen readers say it again.
function say(element, text) {
    if (element.textContent !== text) element.textContent = text;
}

// Elements of `parent` for `items`: those of a key that is still there are kept, so that what is open stays open.
function keep(parent, items, create, update) {
    const before = new Map(Array.from(parent.children, (child) => [child.dataset.key, child]));
    const done = new Set();
    let at = parent.firstElementChild;
    for (const item of items) {
        if (done.has(item.key)) continue;
        done.add(item.key);
        let element = before.get(item.key);
        if (element) {
            before.delete(item.key);
        } else {
            element = create(item);
            element.dataset.key = item.key;
        }
        if (element === at) at = at.nextElementSibling;
        else parent.insertBefore(element, at);
        update(element, item);
    }
    for (const gone of before.values()) gone.remove();
}

// --- Parts -----------------------------------------------------------------------------------------------------------

const part = (element, name) => element.querySelector(`[data-part="${name}"]`);

function named(element, name) {
    element.dataset.part = name;
    return element;
}

function makeBar(name, label) {
    const bar = named(make("div", "bar"), name);
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-label", label);
    bar.setAttribute("aria-valuemin", "0");
    bar.setAttribute("aria-valuemax", "100");
    bar.append(make("span", "booked"), make("span", "used"));
    return bar;
}

const percent = (value) => Math.min(100, Math.max(0, (value || 0) * 100));

function setBar(bar, used, booked, text) {
    bar.querySelector(".booked").style.width = `${percent(booked)}%`;
    bar.querySelector(".used").style.width = `${percent(used)}%`;
    bar.setAttribute("aria-valuenow", String(Math.round(percent(used))));
    bar.setAttribute("aria-valuetext", used === null ? "not reported" : text);
}

function makeMeasure(name, label) {
    const measure = named(make("div", "measure"), `${name}-measure`);
    measure.append(make("span", "faint", label), named(make("span", "value"), `${name}-text`), makeBar(name, label));
    return measure;
}

// Memory that is nearly full needs attention; an SM that is busy does not.
function setMemory(bar, used, booked, text) {
    setBar(bar, used, booked, text);
    bar.classList.toggle("full", used >= 0.95);
    bar.classList.toggle("high", used >= 0.8 && used < 0.95);
}

function setMeasure(element, name, bar) {
    const set = name === "memory" ? setMemory : setBar;
    set(part(element, name), bar.used, bar.booked, bar.text);
    say(part(element, `${name}-text`), bar.text);
}

function makeSpark(name) {
    const spark = document.createElementNS(SVG, "svg");
    spark.setAttribute("class", "spark");
    spark.setAttribute("viewBox", "0 0 59 20");
    spark.setAttribute("preserveAspectRatio", "none");
    spark.setAttribute("role", "img");
    for (const kind of ["area", "trace"]) {
        const path = document.createElementNS(SVG, "path");
        path.setAttribute("class", kind);
        spark.append(path);
    }
    return named(spark, name);
}

// A value for each five seconds, the newest at the right; null: not known, a gap.
function setSpark(spark, past, what) {
    const y = (value) => (19 - (value * 18) / 100).toFixed(1);
    let trace = "";
    let area = "";
    let start = null;
    const first = 60 - past.length;
    const close = (x) => {
        if (start !== null) area += `L${x} 20L${start} 20Z`;
        start = null;
    };
    past.forEach((value, at) => {
        const x = first + at;
        if (value === null) return close(x - 1);
        // A single value is a short line.
        const point = start === null ? `M${Math.max(0, x - 0.5)} ${y(value)}L${x} ${y(value)}` : `L${x} ${y(value)}`;
        trace += point;
        area += point;
        if (start === null) start = Math.max(0, x - 0.5);
    });
    close(59);
    spark.querySelector(".trace").setAttribute("d", trace);
    spark.querySelector(".area").setAttribute("d", area);
    const known = past.filter((value) => value !== null);
    const most = known.length ? `at most ${Math.max(...known)} %` : "not reported";
    spark.setAttribute("aria-label", `${what}, last five minutes: ${most}`);
    spark.toggleAttribute("hidden", known.length === 0);
    return known.length > 0;
}

function makeTrace() {
    const trace = named(make("div", "measure"), "trace");
    trace.append(make("span", "faint", "Busy, last 5 minutes"), makeSpark("past"));
    return trace;
}

function setProcesses(list, processes) {
    const items = processes.map((process) => ({ key: String(process.pid), process }));
    const text = ({ name, pid, memory, busy }) => `${name} (pid ${pid}) ${memory}${busy === "-" ? "" : `, ${busy} busy`}`;
    keep(list, items, () => make("li"), (item, { process }) => say(item, text(process)));
}

// --- GPUs and MIG devices --------------------------------------------------------------------------------------------

function makeDevice(className) {
    const device = make("li", className);
    const head = make("div", "head");
    head.append(named(make("h3"), "number"), named(make("span"), "name"), named(make("span", "tag"), "mode"));
    const measures = make("div", "measures");
    measures.append(makeMeasure("memory", "Memory"), makeMeasure("sm", "SM"), makeTrace());
    device.append(
        head,
        named(make("p", "fault"), "fault"),
        measures,
        named(make("dl", "facts"), "facts"),
        named(make("ul", "outside fault"), "outside"),
        named(make("ul", "parts"), "parts"),
    );
    return device;
}

function setDevice(element, device, label) {
    say(part(element, "number"), `${label} ${device.number}`);
    say(part(element, "name"), device.name);
    say(part(element, "mode"), device.mode);
    const fault = part(element, "fault");
    say(fault, device.fault || "");
    fault.hidden = !device.fault;
    setMeasure(element, "memory", device.memory);
    setMeasure(element, "sm", device.sm);
    // Of a GPU in MIG mode the driver reports no load, and only its parts are booked.
    part(element, "sm-measure").hidden = device.sm.used === null && !device.sm.booked;
    part(element, "trace").hidden = !setSpark(part(element, "past"), device.past, "Busy");
    const facts = device.facts.map(([key, value]) => ({ key, value }));
    keep(part(element, "facts"), facts, makeFact, (fact, { value }) => say(fact.lastElementChild, value));
    part(element, "facts").hidden = facts.length === 0;
    part(element, "outside").hidden = device.outside.length === 0;
    setProcesses(part(element, "outside"), device.outside.map((process) => ({ ...process, name: `No lease: ${process.name}` })));
    keep(part(element, "parts"), device.parts, () => makeDevice("part"), (child, item) => setDevice(child, item, "MIG"));
    part(element, "parts").hidden = device.parts.length === 0;
}

function makeFact({ key }) {
    const fact = make("div");
    fact.append(make("dt", "", key), make("dd"));
    return fact;
}

// --- Containers ------------------------------------------------------------------------------------------------------

const CELLS = [
    ["name", "Container"],
    ["memory", "Memory"],
    ["gpu", "GPU"],
    ["mode", "Mode"],
    ["sm", "SM limit"],
    ["busy", "Busy"],
    ["processes", "Processes"],
    ["user", "User"],
    ["state", "State"],
    ["age", "Age"],
];

function makeContainer() {
    const row = make("tr");
    row.setAttribute("role", "row");
    for (const [name, label] of CELLS) {
        const cell = make("td", name);
        cell.setAttribute("role", "cell");
        cell.dataset.label = label;
        if (name === "processes") {
            const details = make("details");
            details.append(named(make("summary"), name), named(make("ul"), "process-list"));
            cell.append(details);
        } else {
            cell.append(named(make("div"), name));
        }
        if (name === "name") cell.append(named(make("div", "image"), "image"));
        if (name === "memory") cell.append(makeBar("memory-bar", "Memory of its limit"), makeSpark("past"));
        row.append(cell);
    }
    return row;
}

function setContainer(row, container) {
    for (const name of ["name", "image", "gpu", "mode", "sm", "busy", "memory", "user", "state", "age"]) {
        say(part(row, name), container[name]);
    }
    part(row, "image").hidden = container.image === "-";
    say(part(row, "processes"), container.process_count);
    setProcesses(part(row, "process-list"), container.processes);
    setMemory(part(row, "memory-bar"), container.memory_used, null, container.memory);
    setSpark(part(row, "past"), container.past, "Memory of its limit");
}

// --- The page --------------------------------------------------------------------------------------------------------

const count = (number, of) => `${number} ${of}${number === 1 ? "" : "s"}`;

function show(data) {
    say(byId("host"), data.host);
    document.title = `${data.host}: sublet top`;
    const looked = data.age_seconds !== null;
    main.hidden = !looked && !data.error;
    if (looked) {
        const parts = [count(data.gpus.length, "GPU"), count(data.containers.length, "container")];
        parts.push(data.guard, `driver ${data.driver}`);
        if (data.simulated) parts.push("SIMULATED");
        say(byId("summary"), parts.join(" · "));
    }
    byId("warning-section").hidden = data.warnings.length === 0;
    const warnings = data.warnings.map((text) => ({ key: text, text }));
    keep(byId("warnings"), warnings, ({ text }) => make("li", "", text), () => {});
    keep(byId("gpus"), data.gpus, () => makeDevice("card"), (element, gpu) => setDevice(element, gpu, "GPU"));
    keep(byId("containers"), data.containers, makeContainer, setContainer);
    byId("none").hidden = data.containers.length > 0;
    document.querySelector("table").hidden = data.containers.length === 0;
    tell(data, looked);
}

function tell(data, looked) {
    const old = OLD + (2 * data.interval_milliseconds) / 1000;
    if (data.error) trouble(`${looked ? "What is below is old: " : ""}${data.error}`);
    else if (!looked) trouble("Looking for the driver");
    else if (data.age_seconds > old) trouble(`What is below is ${data.age_seconds} s old: the driver does not answer`);
    else live();
}

function live() {
    const line = byId("live");
    line.className = "";
    main.classList.remove("old");
    say(line, "Live");
}

function trouble(text) {
    const line = byId("live");
    line.className = "trouble";
    main.classList.add("old");
    say(line, text);
}

async function ask() {
    let wait = 1000;
    try {
        const response = await fetch("data.json", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
        if (!response.ok) throw new Error(String(response.status));
        const data = await response.json();
        answered = Date.now();
        wait = Math.min(1000, data.interval_milliseconds);
        show(data);
    } catch {
        const since = answered ? ` for ${Math.round((Date.now() - answered) / 1000)} s: what is below is old` : "";
        trouble(`sublet top --web does not answer${since}. It may have ended; a new one has a new URL`);
    }
    return wait;
}

async function run() {
    if (running) return;
    running = true;
    const wait = await ask();
    running = false;
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(run, wait);
}

// A page that nobody sees asks for nothing.
document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (!document.hidden) run();
});
run();
