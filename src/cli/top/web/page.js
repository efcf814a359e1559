// Asks the server for the state of the host again and again, and puts it into the page. Names are put in as text alone.
"use strict";

// How long an answer may take, in milliseconds.
const PATIENCE = 8000;
// A look older than this, in seconds, is said to be old.
const OLD = 5;

const byId = (id) => document.getElementById(id);
const main = document.querySelector("main");
let timer = 0;
let running = false;
let answered = 0;

// A new element like the one in the page's template `id`.
const copy = (id) => byId(id).content.firstElementChild.cloneNode(true);

// Text that did not change is left alone: it may be selected, and screen readers say it again.
function say(element, text) {
    if (element.textContent !== text) element.textContent = text;
}

// Elements of `parent` for `items`: an element of a key that is still there is kept, so that what is open stays open.
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

const percent = (value) => Math.min(100, Math.max(0, (value || 0) * 100));

// Memory that is nearly full needs attention; an SM that is busy does not.
function setBar(bar, used, booked, text, isMemory) {
    bar.querySelector(".booked").style.width = `${percent(booked)}%`;
    bar.querySelector(".used").style.width = `${percent(used)}%`;
    bar.setAttribute("aria-valuenow", String(Math.round(percent(used))));
    bar.setAttribute("aria-valuetext", used === null ? "not reported" : text);
    bar.classList.toggle("full", isMemory && used >= 0.95);
    bar.classList.toggle("high", isMemory && used >= 0.8 && used < 0.95);
}

function setMeasure(element, name, bar) {
    setBar(part(element, name), bar.used, bar.booked, bar.text, name === "memory");
    say(part(element, `${name}-text`), bar.text);
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

// Lines of text; without any, the list is hidden.
function setList(list, items) {
    keep(list, items, () => document.createElement("li"), (line, { text }) => say(line, text));
    list.hidden = items.length === 0;
}

// --- GPUs and MIG devices --------------------------------------------------------------------------------------------

function makeDevice(className) {
    const device = copy("device");
    device.className = className;
    return device;
}

function setDevice(element, device, label) {
    say(part(element, "number"), `${label} ${device.number}`);
    for (const name of ["name", "mode", "fault"]) say(part(element, name), device[name] || "");
    part(element, "fault").hidden = !device.fault;
    setMeasure(element, "memory", device.memory);
    setMeasure(element, "sm", device.sm);
    // Of a GPU in MIG mode the driver reports no load, and only its parts are booked.
    part(element, "sm-measure").hidden = device.sm.used === null && !device.sm.booked;
    part(element, "trace").hidden = !setSpark(part(element, "past"), device.past, "Busy");
    const facts = device.facts.map(([key, value]) => ({ key, value }));
    keep(part(element, "facts"), facts, makeFact, (fact, { value }) => say(fact.lastElementChild, value));
    part(element, "facts").hidden = facts.length === 0;
    setList(part(element, "outside"), device.outside);
    keep(part(element, "parts"), device.parts, () => makeDevice("part"), (child, item) => setDevice(child, item, "MIG"));
    part(element, "parts").hidden = device.parts.length === 0;
}

function makeFact({ key }) {
    const fact = document.createElement("div");
    fact.append(document.createElement("dt"), document.createElement("dd"));
    say(fact.firstElementChild, key);
    return fact;
}

// --- Containers ------------------------------------------------------------------------------------------------------

const TEXTS = ["name", "image", "gpu", "mode", "sm", "busy", "memory", "processes", "user", "owner", "state", "age"];

function setContainer(row, container) {
    for (const name of TEXTS) say(part(row, name), container[name]);
    part(row, "image").hidden = container.image === "-";
    part(row, "owner").hidden = container.owner === "";
    setList(part(row, "process-list"), container.process_list);
    setBar(part(row, "memory-bar"), container.memory_used, null, container.memory, true);
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
    setList(byId("warnings"), data.warnings.map((text) => ({ key: text, text })));
    keep(byId("gpus"), data.gpus, () => makeDevice("card"), (element, gpu) => setDevice(element, gpu, "GPU"));
    keep(byId("containers"), data.containers, () => copy("container"), setContainer);
    byId("none").hidden = data.containers.length > 0;
    document.querySelector("table").hidden = data.containers.length === 0;
    tell(data, looked);
}

function tell(data, looked) {
    const old = OLD + (2 * data.interval_milliseconds) / 1000;
    if (data.error) live(`${looked ? "What is below is old: " : ""}${data.error}`);
    else if (!looked) live("Looking for the driver");
    else if (data.age_seconds > old) live(`What is below is ${data.age_seconds} s old: the driver does not answer`);
    else live("");
}

// The fault, if there is one.
function live(trouble) {
    const line = byId("live");
    line.className = trouble && "trouble";
    main.classList.toggle("old", trouble !== "");
    say(line, trouble || "Live");
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
        live(`sublet top --web does not answer${since}. It may have ended; a new one has a new URL`);
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
