"use strict";
// Draws the board from the object in #data, and keeps it up to date if it is live. Texts are only set as text.
(() => {
  const MOST_CHOSEN = 8, ROWS = 100, POLL_MS = 1000, READING_MS = 50, HIDDEN_MS = 10000, MOST_LINES = 3000;
  const data = JSON.parse(document.getElementById("data").textContent);
  const { isLive } = data;
  const $ = (selector) => document.querySelector(selector);
  const el = (tag, attributes, ...children) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes ?? {})) if (value != null) made.setAttribute(name, value);
    made.append(...children.filter((child) => child != null));
    return made;
  };
  const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const setAttribute = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };

  // -- numbers and times as people read them

  const whole = (value) => value.toLocaleString("en", { maximumFractionDigits: 0 });
  const amount = (value) => {
    if (typeof value !== "number") return value ?? "";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    for (const [unit, least] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) if (size >= least) return `${(value / least).toPrecision(4)}${unit}`;
    return Number.isInteger(value) || size >= 1000 ? whole(value) : value.toPrecision(4);
  };
  const two = (value) => String(Math.floor(value)).padStart(2, "0");
  const duration = (s) => {
    if (s == null || !isFinite(s) || s < 0) return "";
    if (s < 60) return `${Math.floor(s)}s`;
    if (s < 3600) return `${Math.floor(s / 60)}m ${two(s % 60)}s`;
    if (s < 86400) return `${Math.floor(s / 3600)}h ${two((s % 3600) / 60)}m`;
    return `${Math.floor(s / 86400)}d ${two((s % 86400) / 3600)}h`;
  };
  const clock = (s) => (s ? new Date(s * 1000).toLocaleString() : "");
  const rate = (r) => {
    if (!r) return "";
    const [value, unit] = r >= 1 ? [r, "s"] : r * 60 >= 1 ? [r * 60, "min"] : [r * 3600, "h"];
    return `${value >= 1000 ? whole(value) : value.toFixed(1)}/${unit}`;
  };

  // -- what is known, and what the user has chosen

  const rows = new Map();
  let version = 0, offered = 0, skew = 0, limit = ROWS, order = [], known = 0, current = null;
  const chosen = new Map(); // the colour of each chosen run
  const view = { metric: "", sort: "began", up: false, filter: "", states: [], best: "", isLog: false, smooth: 0, setting: "", chosen: null };
  try { Object.assign(view, JSON.parse(sessionStorage.getItem(data.storage) ?? "{}")); } catch { /* private mode */ }
  const keep = () => {
    try { sessionStorage.setItem(data.storage, JSON.stringify(view)); } catch { /* private mode */ }
  };
  const now = () => (isLive ? Date.now() / 1000 + skew : data.now);
  const ago = (time) => `${duration(Math.max(0, now() - time)).split(" ")[0]} ago`;
  const isActive = (row) => row.state === "running" || row.state === "starting";
  const GOOD_IF_LOW = new RegExp(data.lowestIsBest, "i");
  const isLowest = () => (view.best ? view.best === "lowest" : GOOD_IF_LOW.test(view.metric));
  const curve = (row) => row.curves[view.metric];
  const best = (row) => { const found = curve(row); return found && (isLowest() ? found.low : found.high); };
  const setting = (row) => row.settings[view.setting];
  const latest = (row) => row.metrics[view.metric] ?? curve(row)?.last?.[1]; // an evaluation is not in each report
  const share = (row) => (row.progress ? Math.min(1, Math.max(0, row.progress[0] / row.progress[1])) : null);
  const silence = (row) => (row.reported && row.state === "running" ? now() - row.reported : 0);
  const pace = (row) => (silence(row) > Math.max(10, 5 * row.interval) ? null : row.rate);
  const left = (row) => (isActive(row) && row.progress && pace(row) ? (row.progress[1] - row.progress[0]) / pace(row) : null);
  const took = (row) => (row.began ? (isActive(row) ? now() : row.ended) - row.began : null);
  const late = (row) => {
    return silence(row) > Math.max(60, 10 * row.interval) ? `no report for ${duration(silence(row))}` : "";
  };
  const restarts = (row) => (row.attempts > 1 ? `${row.attempts - 1} restart${row.attempts > 2 ? "s" : ""}` : "");
  const note = (row) => {
    const found = [row.note, late(row)].filter(Boolean).join("; ");
    return found && row.state === "finished" && restarts(row) ? `${restarts(row)}; last failure: ${found}` : found;
  };
  const hosts = (row) => {
    const names = row.hosts.length + row.more_hosts > 1 ? `${row.hosts.length + row.more_hosts} hosts` : row.hosts[0] ?? "";
    return row.ranks ? `${row.ranks} on ${names}` : "";
  };
  const searched = (row) => {
    row.words ??= [row.name, row.state, row.script, ...row.hosts, row.note, ...Object.entries(row.settings).map(([k, v]) => `${k}=${v}`)].join("\n").toLowerCase();
    return row.words;
  };

  // -- the columns. value: what is sorted by; text: what is shown

  const COLUMNS = [
    { key: "name", title: "Name", kind: "", up: true, value: (r) => r.name.toLowerCase() },
    { key: "state", title: "State", kind: "is-state", width: "7.4rem", narrow: "1.2rem", up: true, value: (r) => r.state },
    { key: "progress", title: "Progress", kind: "", width: "8rem", narrow: "5.6rem", value: (r) => share(r) ?? r.step },
    { key: "rate", title: "Rate", kind: "number small", width: "5.6rem", value: pace, text: (r) => rate(pace(r)) },
    { key: "left", title: "Left", kind: "number small", width: "5.6rem", up: true, value: left, text: (r) => duration(left(r)) },
    { key: "last", title: "Last", kind: "number", width: "6rem", narrow: "5.4rem", up: true, value: latest, text: (r) => amount(latest(r)) },
    { key: "best", title: "Best", kind: "number medium", width: "6rem", up: true, value: (r) => best(r)?.[1], text: (r) => amount(best(r)?.[1]) },
    { key: "trend", title: "Trend", kind: "medium", width: "7.5rem" },
    { key: "began", title: "Started", kind: "number medium began", width: "6.3rem", value: (r) => r.began, text: (r) => (r.began ? ago(r.began) : "") },
    { key: "took", title: "Runtime", kind: "number small", width: "5.6rem", value: took, text: (r) => duration(took(r)) },
    { key: "hosts", title: "Ranks", kind: "wide", width: "8.2rem", value: (r) => r.ranks, text: hosts },
    { key: "setting", title: "⇅", kind: "number widest", width: "9rem", up: true, value: setting, text: (r) => String(setting(r) ?? "") },
  ];
  const column = (key) => COLUMNS.find((one) => one.key === key) ?? COLUMNS[8];
  const narrow = matchMedia("(max-width: 560px)");
  const makeHead = () => {
    const head = $("thead tr"), cols = $("colgroup");
    cols.append(el("col", null));
    const all = el("input", { type: "checkbox", id: "all", title: `Draw the first ${MOST_CHOSEN} runs, or none`, "aria-label": `Draw the first ${MOST_CHOSEN} runs, or none` });
    all.addEventListener("change", () => {
      const wanted = chosen.size ? [...chosen.keys()] : order.slice(0, MOST_CHOSEN), isOn = !chosen.size;
      for (const name of wanted) choose(name, isOn);
    });
    head.append(el("th", { class: "choose", scope: "col" }, el("label", null, all)));
    for (const one of COLUMNS) {
      const button = el("button", { type: "button", title: one.value ? `Sort by ${one.title.toLowerCase()}` : null }, one.title);
      button.disabled = !one.value;
      button.addEventListener("click", () => {
        view.up = view.sort === one.key ? !view.up : Boolean(one.up);
        view.sort = one.key;
        reorder();
      });
      head.append(el("th", { class: one.kind, scope: "col", "data-key": one.key }, button));
      cols.append(el("col", { class: one.kind }));
    }
    const menu = el("select", { id: "setting", "aria-label": "The setting in this column" });
    menu.addEventListener("change", () => { view.setting = menu.value; reorder(); });
    head.lastChild.prepend(menu);
    setWidths();
    narrow.addEventListener("change", setWidths);
  };
  const setWidths = () => {
    const [choose, ...others] = $("colgroup").children;
    choose.style.width = "2rem";
    others.forEach((col, n) => { col.style.width = (narrow.matches && COLUMNS[n].narrow) || COLUMNS[n].width || "auto"; });
  };

  // -- the rows

  const nodes = new Map(); // the element of each run that is in the table
  const svg = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const makeRow = (row) => {
    const box = el("input", { type: "checkbox", tabindex: "-1", "aria-label": `Draw the curve of ${row.name}` });
    box.addEventListener("change", () => choose(row.name));
    const made = el("tr", { tabindex: "-1" }, el("td", { class: "choose" }, el("label", null, box)));
    made.box = box;
    made.addEventListener("mouseenter", () => highlight(row.name));
    made.addEventListener("mouseleave", () => highlight(null));
    made.addEventListener("focusin", () => { if (current !== row.name) focusRow(row.name); });
    for (const one of COLUMNS) {
      const cell = el(one.key === "name" ? "th" : "td", { class: one.kind, scope: one.key === "name" ? "row" : null });
      if (one.key === "name") {
        cell.title = row.name;
        made.hint = el("span", { class: "hint" });
        cell.append(row.name, made.hint);
      }
      if (one.key === "progress") {
        made.bar = el("i");
        made.share = el("b");
        made.track = el("span", null, made.bar);
        cell.append(el("div", { class: "progress" }, made.track, made.share));
      }
      if (one.key === "trend") {
        made.line = svg("polyline");
        const drawn = svg("svg");
        drawn.setAttribute("viewBox", "0 -1 100 22");
        drawn.setAttribute("preserveAspectRatio", "none");
        drawn.setAttribute("aria-hidden", "true");
        drawn.append(made.line);
        cell.append(drawn);
      }
      made.append(cell);
    }
    made.addEventListener("click", (event) => {
      if (event.target.closest(".choose")) return;
      focusRow(row.name);
      open(row.name);
    });
    return made;
  };
  const sparkline = (found) => {
    if (!found || found.x.length < 2) return "";
    const first = found.x[0], width = found.x.at(-1) - first || 1, low = Math.min(...found.y), height = Math.max(...found.y) - low || 1;
    return found.x.map((x, n) => `${(((x - first) / width) * 100).toFixed(1)},${(20 - ((found.y[n] - low) / height) * 20).toFixed(1)}`).join(" ");
  };
  const drawTimes = (row, made) => {
    for (const [n, one] of COLUMNS.entries()) if (one.text) setText(made.children[n + 1], one.text(row));
    const state = made.children[2];
    setAttribute(state, "class", `state is-state ${row.state}${isActive(row) && note(row) ? " noted" : ""}`);
    setText(made.hint, note(row) || (row.unread > 1e6 ? "still being read" : restarts(row)));
    setAttribute(made.querySelector(".began"), "title", clock(row.began));
    setAttribute(state, "title", note(row) ? `${row.state}: ${note(row)}` : row.state);
  };
  const drawRow = (row) => {
    const made = nodes.get(row.name);
    if (!made) return;
    const colour = chosen.get(row.name), part = share(row);
    setAttribute(made, "class", colour == null ? "" : `own${colour}`);
    setAttribute(made, "aria-selected", String(current === row.name));
    made.box.checked = colour != null;
    setText(made.children[2], row.state);
    made.track.hidden = part == null;
    if (part != null) made.bar.style.width = `${(part * 100).toFixed(1)}%`;
    setText(made.share, part != null ? `${Math.floor(part * 100)}%` : row.step ? `step ${whole(row.step)}` : "");
    setAttribute(made.track, "class", isActive(row) ? "active" : "");
    setAttribute(made.children[3], "title", row.progress ? `${whole(row.progress[0])} of ${whole(row.progress[1])}` : row.step ? `step ${whole(row.step)}` : "");
    const found = curve(row);
    if (made.drawn !== found) setAttribute(made.line, "points", sparkline((made.drawn = found)));
    drawTimes(row, made);
  };
  const compare = (a, b) => {
    const { value } = column(view.sort), [x, y] = [value(a), value(b)];
    const lacks = (v) => v == null || v === "" || (typeof v !== typeof (x ?? y) && typeof v === "string");
    if (lacks(x) || lacks(y)) return lacks(x) - lacks(y) || b.began - a.began;
    return (x < y ? -1 : x > y ? 1 : 0) * (view.up ? 1 : -1) || b.began - a.began;
  };
  const reorder = () => {
    const words = view.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [...rows.values()].filter((row) => words.every((word) => searched(row).includes(word)));
    drawStates(found);
    order = found.filter((row) => !view.states.length || view.states.includes(row.state)).sort(compare).map((row) => row.name);
    for (const th of document.querySelectorAll("thead th[data-key]")) {
      if (th.dataset.key === view.sort) th.setAttribute("aria-sort", view.up ? "ascending" : "descending");
      else th.removeAttribute("aria-sort");
    }
    place();
    keep();
  };
  const place = () => {
    const body = $("main > table > tbody"), wanted = order.slice(0, limit), focused = document.activeElement;
    for (const name of wanted) if (!nodes.has(name)) nodes.set(name, makeRow(rows.get(name)));
    const placed = wanted.map((name) => nodes.get(name));
    if (placed.length !== body.children.length || placed.some((node, n) => body.children[n] !== node)) {
      body.replaceChildren(...placed);
      if (focused && body.contains(focused)) focused.focus({ preventScroll: true });
    }
    const kept = new Set(wanted);
    for (const name of nodes.keys()) if (!kept.has(name)) nodes.delete(name);
    for (const name of wanted) drawRow(rows.get(name));
    const stop = nodes.get(current) ?? placed[0];
    for (const node of placed) setAttribute(node, "tabindex", node === stop ? "0" : "-1");
    const empty = $("#empty");
    empty.hidden = order.length > 0;
    setText(empty, rows.size ? "No run matches the filter." : "There are no runs here yet. They appear as they start.");
  };
  const STATES = ["running", "starting", "finished", "failed", "killed", "stopped", "damaged"];
  const drawStates = (found) => {
    const counts = {};
    for (const row of found) counts[row.state] = (counts[row.state] ?? 0) + 1;
    const shown = STATES.filter((state) => counts[state] || view.states.includes(state));
    const place = $("#states");
    if (shown.join() !== [...place.children].map((one) => one.dataset.state).join()) {
      place.replaceChildren(...shown.map((state) => {
        const button = el("button", { type: "button", "data-state": state }, el("span", { class: `state ${state}` }, state), el("b"));
        button.addEventListener("click", () => {
          view.states = view.states.includes(state) ? view.states.filter((one) => one !== state) : [...view.states, state];
          limit = ROWS;
          reorder();
        });
        return button;
      }));
    }
    for (const button of place.children) {
      setText(button.lastChild, whole(counts[button.dataset.state] ?? 0));
      setAttribute(button, "aria-pressed", String(view.states.includes(button.dataset.state)));
    }
  };

  // -- the plot

  const smoothed = (values) => { // as TensorBoard does: an exponential average that starts without a bias
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      sum = view.smooth * sum + value;
      weight = view.smooth * weight + 1;
      return sum / weight;
    });
  };
  let plot = null, plotted = "", isZoomed = false, ends = [];
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const choose = (name, isOn = !chosen.has(name)) => {
    if (!isOn) chosen.delete(name);
    else if (!chosen.has(name)) {
      if (chosen.size >= MOST_CHOSEN) chosen.delete(chosen.keys().next().value);
      const used = new Set(chosen.values());
      chosen.set(name, [...Array(MOST_CHOSEN).keys()].find((n) => !used.has(n)));
    }
    view.chosen = [...chosen.keys()];
    $("#all").checked = chosen.size > 0;
    for (const row of rows.values()) drawRow(row);
    keep();
    drawPlot();
    refresh(version);
  };
  const refresh = async (since) => {
    if (isLive) try { apply(await ask(since)); } catch { /* the next poll says so */ }
  };
  const drawPlot = () => {
    const place = $("#plot"), names = [...chosen.keys()].filter((name) => curve(rows.get(name))?.x.length);
    const log = view.isLog && names.every((name) => curve(rows.get(name)).low[1] > 0);
    const wanted = JSON.stringify([view.metric, log, names.map((name) => [name, chosen.get(name)])]);
    const curves = names.map((name) => curve(rows.get(name)));
    const joined = names.length ? uPlot.join(curves.map(({ x, y }) => [x, smoothed(y)])) : null;
    ends = curves.map(({ x }) => x.at(-1));
    if (plot && plotted === wanted) {
      plot.setData(joined, !isZoomed);
      return;
    }
    plot?.destroy();
    plot = null;
    plotted = wanted;
    isZoomed = false;
    if (!joined) {
      place.replaceChildren(el("p", { class: "empty" }, view.metric ? `Choose runs in the table to draw their ${view.metric}.` : "No run has reported a number yet."));
      return;
    }
    place.replaceChildren();
    const axis = { stroke: () => color("soft"), grid: { stroke: () => color("line"), width: 1 }, ticks: { show: false } };
    const short = (v) => (v == null ? "" : Math.abs(v) >= 1e6 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1) : v.toLocaleString("en", { maximumSignificantDigits: 4 }));
    plot = new uPlot({
      ...plotSize(),
      scales: { x: { time: false }, y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, gap: 2, values: (u, all) => all.map((v) => (Number.isInteger(v) ? short(v) : "")) },
        { ...axis, size: 56, values: (u, all) => all.map(short) },
      ],
      series: [
        { label: "step", value: (u, v) => (v == null ? "–" : whole(v)) },
        ...names.map((name) => ({ label: name, stroke: () => color(`c${chosen.get(name)}`), width: 1.5, spanGaps: true, points: { show: joined[0].length < 3 }, value: (u, v) => amount(v) || "–" })),
      ],
      cursor: {
        drag: { x: true, y: false }, y: false, focus: { prox: 16 },
        hover: { prox: (u, n) => (u.posToVal(u.cursor.left, "x") > ends[n - 1] ? 8 : Infinity) }, // no value of a curve beyond its end
      },
      focus: { alpha: 0.25 },
      hooks: { setSelect: [(u) => { isZoomed = u.select.width > 0; }] },
    }, joined, place);
    plot.over.addEventListener("dblclick", () => { isZoomed = false; });
    place.setAttribute("aria-label", `Curves of ${view.metric}: ${names.join(", ")}`);
  };
  const plotSize = () => ({ width: Math.max(200, $("#plot").clientWidth - 20), height: Math.round(Math.max(160, Math.min(300, innerHeight / 4))) });
  const highlight = (name) => {
    const n = plot ? plot.series.findIndex((one) => one.label === name) : -1;
    if (plot) plot.setSeries(n > 0 ? n : null, { focus: true });
  };

  // -- one run

  let following = new AbortController();
  const fact = (title, ...values) => (values.some(Boolean) ? [el("dt", null, title), el("dd", null, ...values)] : []);
  const facts = (row) => {
    const listed = (all, shown) => Object.entries(all).map(([name, value]) => el("span", null, `${name}=${shown(value)} `));
    const found = best(row);
    return [
      ...fact("script", row.script), ...fact("started", clock(row.began)), ...fact("runtime", duration(took(row))),
      ...fact("step", row.progress ? `${whole(row.progress[0])} of ${whole(row.progress[1])}` : row.step ? whole(row.step) : ""),
      ...fact("attempts", row.attempts > 1 ? String(row.attempts) : ""),
      ...fact("ranks", row.hosts.length ? `${row.ranks} on ${row.hosts.join(", ")}${row.more_hosts ? ` and ${row.more_hosts} more` : ""}` : ""),
      ...fact("metrics", ...listed(row.metrics, amount)),
      ...fact("best", found ? `${view.metric}=${amount(found[1])} at step ${whole(found[0])}` : ""),
      ...fact("settings", ...listed(row.settings, String)),
    ];
  };
  const open = (name) => {
    const row = rows.get(name), panel = $("#details"), path = `runs/${encodeURIComponent(name)}`;
    if (!row) return;
    current = name;
    const close = el("button", { type: "button", "aria-label": "Close" }, "✕");
    close.addEventListener("click", shut);
    const target = isLive ? `${path}/` : data.pages ? `${path}.html` : null;
    const actions = el("p", { class: "actions" }, target && el("a", { href: target, target: "_blank", rel: "noopener" }, "Page of the run ↗"));
    const answer = el("pre", { class: "answer", tabindex: "0", hidden: "" });
    const ask = async (word) => {
      answer.hidden = false;
      answer.textContent = "…";
      try {
        answer.textContent = await (await fetch(`${path}/${word}`, { method: "POST" })).text();
      } catch { answer.textContent = "The board does not answer."; }
    };
    if (isLive && isActive(row)) {
      const stacks = el("button", { type: "button", title: "Show where all ranks are" }, "Stacks");
      const stop = el("button", { type: "button", class: "danger" }, "Stop");
      stacks.addEventListener("click", () => ask("stacks"));
      stop.addEventListener("click", () => {
        if (stop.dataset.sure) { stop.disabled = true; ask("stop"); }
        else { stop.dataset.sure = "yes"; stop.textContent = "Really stop the run?"; }
      });
      stop.addEventListener("blur", () => { delete stop.dataset.sure; stop.textContent = "Stop"; });
      actions.append(stacks, stop);
    }
    const log = isLive ? el("pre", { class: "log", tabindex: "0", "aria-label": "Output of the ranks" }) : null;
    panel.replaceChildren(
      el("div", { class: "head" }, el("h2", null, name), close),
      el("p", { class: "line" }), el("p", { class: `note ${row.state}` }), actions, answer, el("dl", { class: "facts" }), ...(log ? [log] : []),
    );
    panel.hidden = false;
    drawDetails();
    place();
    following.abort();
    following = new AbortController();
    if (log) follow(row, path, log, following.signal);
  };
  const drawDetails = () => {
    const row = rows.get(current), panel = $("#details");
    if (!row || panel.hidden) return;
    const line = panel.querySelector(".line"), found = panel.querySelector(".facts");
    line.replaceChildren(el("span", { class: `state ${row.state}` }, row.state));
    setText(panel.querySelector(".note"), note(row));
    const wanted = facts(row);
    if (wanted.map((one) => one.textContent).join("\n") !== [...found.children].map((one) => one.textContent).join("\n")) found.replaceChildren(...wanted);
    for (const button of panel.querySelectorAll(".actions button")) if (!isActive(row)) button.disabled = true;
  };
  const shut = () => {
    following.abort();
    $("#details").hidden = true;
    focusRow(current);
  };
  const follow = async (row, path, log, signal) => {
    let rest = "";
    const plain = (text) => text.replace(/\x1b\[[0-9;:]*m/g, "");
    try {
      const stream = (await fetch(`${path}/log`, { signal })).body.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await stream.read(); !part.done; part = await stream.read()) {
        const lines = (rest + part.value).split("\n"), isAtEnd = log.scrollTop + log.clientHeight > log.scrollHeight - 30;
        rest = lines.pop();
        log.append(...lines.map((line) => JSON.parse(line)).map(([, rank, text]) => `${row.ranks > 1 ? `[rank ${rank}] ` : ""}${plain(text)}\n`));
        while (log.childNodes.length > MOST_LINES) log.firstChild.remove();
        if (isAtEnd) log.scrollTop = log.scrollHeight;
      }
      if (!log.textContent) log.textContent = "The ranks have printed nothing, or their logs are not on this machine.";
    } catch (error) {
      if (!signal.aborted) log.append("\nThe output can no longer be followed; open the run again.\n");
    }
  };

  // -- keys

  const focusRow = (name) => {
    const before = nodes.get(current);
    current = rows.has(name) ? name : order[0];
    if (before) setAttribute(before, "tabindex", "-1");
    const node = nodes.get(current);
    for (const one of [before, node]) if (one) setAttribute(one, "aria-selected", String(one === node));
    if (!node) return;
    node.setAttribute("tabindex", "0");
    node.focus({ preventScroll: true });
    node.scrollIntoView({ block: "nearest" });
  };
  const move = (by) => {
    const at = order.indexOf(current), next = Math.max(0, Math.min(order.length - 1, at < 0 ? 0 : at + by));
    if (next >= limit) { limit = next + ROWS; place(); }
    focusRow(order[next]);
    if (!$("#details").hidden) open(order[next]);
  };
  addEventListener("keydown", (event) => {
    const { key } = event, isTyping = event.target.closest("input[type=search], select");
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (key === "Escape" && !$("#details").hidden) shut();
    else if (key === "Escape" && isTyping) focusRow(current);
    else if (key === "/" && !isTyping) $("#filter").focus();
    else if (isTyping || event.target.closest("#details, button, a")) return;
    else if (key === "ArrowDown" || key === "j") move(1);
    else if (key === "ArrowUp" || key === "k") move(-1);
    else if (key === "PageDown") move(20);
    else if (key === "PageUp") move(-20);
    else if (key === "Home") move(-Infinity);
    else if (key === "End") move(Infinity);
    else if (key === " " && current) choose(current);
    else if (key === "Enter" && current) { open(current); $("#details").focus(); }
    else return;
    event.preventDefault();
  });

  // -- what comes from the server

  const setStatus = (kind, text) => {
    setAttribute($("#status"), "class", kind);
    setText($("#status"), text);
  };
  const apply = (found) => {
    const before = rows.size, there = new Set(found.runs);
    let isNew = false, isDrawn = false;
    for (const name of rows.keys()) if (!there.has(name)) isNew = rows.delete(name);
    for (const row of found.rows) {
      const old = rows.get(row.name);
      isNew ||= !old || old.state !== row.state;
      isDrawn ||= chosen.has(row.name) && JSON.stringify(old?.curves) !== JSON.stringify(row.curves);
      rows.set(row.name, row);
    }
    version = found.version;
    skew = found.now - Date.now() / 1000;
    for (const name of chosen.keys()) if (!rows.has(name)) chosen.delete(name);
    drawMetrics(found.rows);
    drawSettings(found.rows);
    if (isNew || rows.size !== before) reorder();
    else for (const row of found.rows) drawRow(row);
    if (isDrawn) drawPlot();
    if (!chosen.size) chooseFirst();
  };
  const chooseFirst = () => {
    const newest = [...rows.values()].filter((row) => curve(row)).sort((a, b) => b.began - a.began).map((row) => row.name);
    for (const name of (view.chosen ?? newest.slice(0, 5)).filter((one) => rows.has(one))) choose(name, true);
    if (!chosen.size) drawPlot();
  };
  const metrics = new Set();
  const mostCommon = (runs) => {  // a loss is preferred
    const score = (name) => runs.filter((run) => typeof run.metrics[name] === "number").length * (/loss/i.test(name) ? 2 : 1);
    return [...metrics].sort((one, other) => score(other) - score(one))[0] ?? "";
  };
  const settings = new Set();
  const drawSettings = (changed) => {
    for (const row of changed) for (const name of Object.keys(row.settings)) settings.add(name);
    const differs = (name) => new Set([...rows.values()].map((row) => String(row.settings[name]))).size > 1;
    if (!settings.has(view.setting)) view.setting = [...settings].find(differs) ?? "";
    if (settings.size !== offered) $("#setting").replaceChildren(...[...settings].sort().map((name) => el("option", { value: name }, name)));
    offered = settings.size;
    $("#setting").value = view.setting;
  };
  const drawMetrics = (changed) => {
    for (const row of changed) for (const [name, value] of Object.entries(row.metrics)) if (typeof value === "number") metrics.add(name);
    if (!view.metric) view.metric = mostCommon(changed);
    if (view.metric) metrics.add(view.metric);
    if (metrics.size !== known) {
      known = metrics.size;
      $("#metric").replaceChildren(...[...metrics].sort().map((name) => el("option", { value: name }, name)));
    }
    $("#metric").value = view.metric;
    setText($("#best"), `best: ${isLowest() ? "lowest" : "highest"}`);
  };
  const ask = async (since) => {
    const metric = view.metric, drawn = [...chosen.keys()].map((name) => ["run", name]);
    const answer = await fetch(`data?${new URLSearchParams([["since", since], ["metric", metric], ...drawn])}`);
    if (answer.status === 403) throw new Error("This board has ended");
    const found = await answer.json();
    return metric === view.metric || !metric ? found : ask(0); // it was changed meanwhile
  };
  let ticks = 0;
  const poll = async () => {
    try {
      apply(await ask(version));
      setStatus("live", "live");
    } catch (error) {
      setStatus("lost", error.message === "This board has ended" ? error.message : "Not connected; trying again");
    }
    ticks += 1;
    for (const name of order.slice(0, limit)) {
      const row = rows.get(name);
      if (nodes.has(name) && (isActive(row) || ticks % 30 === 0)) drawTimes(row, nodes.get(name));
    }
    drawDetails();
    const isBehind = [...rows.values()].some((row) => row.unread);
    setTimeout(poll, document.hidden ? HIDDEN_MS : isBehind ? READING_MS : POLL_MS);
  };

  // -- the beginning

  setText($("#storage"), data.storage);
  document.title = `${data.storage.split("/").at(-1)} - distrain board`;
  makeHead();
  $("#filter").value = view.filter;
  $("#filter").addEventListener("input", (event) => { view.filter = event.target.value; limit = ROWS; reorder(); });
  $("#metric").addEventListener("change", async (event) => {
    view.metric = event.target.value;
    view.best = "";
    await refresh(0);
    drawMetrics([]);
    reorder();
    drawPlot();
  });
  $("#best").addEventListener("click", () => {
    view.best = isLowest() ? "highest" : "lowest";
    drawMetrics([]);
    reorder();
  });
  $("#smooth").value = view.smooth;
  $("#smooth").addEventListener("input", (event) => { view.smooth = Number(event.target.value); keep(); drawPlot(); });
  const log = $("#log");
  log.setAttribute("aria-pressed", String(view.isLog));
  log.addEventListener("click", () => {
    view.isLog = !view.isLog;
    log.setAttribute("aria-pressed", String(view.isLog));
    keep();
    drawPlot();
  });
  new IntersectionObserver((seen) => {
    if (seen.some((one) => one.isIntersecting) && limit < order.length) { limit += ROWS; place(); }
  }, { rootMargin: "600px" }).observe($("#more"));
  addEventListener("resize", () => plot?.setSize(plotSize()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot?.redraw(false));
  document.addEventListener("visibilitychange", () => { if (!document.hidden) for (const row of rows.values()) drawRow(row); });
  const begin = async () => {
    try {
      apply(isLive ? await ask(0) : data);
      if (isLive && rows.size && ![...rows.values()].some(curve)) apply(await ask(0)); // another metric was sent
    } catch { /* poll() says so */ }
    if (isLive) poll();
  };
  begin();
  if (!isLive) setStatus("", `written ${clock(data.now)}`);
})();
