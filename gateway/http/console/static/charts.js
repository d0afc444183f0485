// The overview's charts. Data comes as columns (forebay:history), then one row a second (forebay:sample):
// time, tokens/s, fairness, first token p50 p95 p99, between tokens p50 p95 p99, shed, throttled,
// then share and entitlement by tenant.
"use strict";
(() => {
  const KEEP = 900;
  const HEIGHT = 160;
  const FIXED = 11;
  let tenants = [];
  let columns = [];
  let plots = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const series = (label, column, colour, more = {}) => ({
    column,
    spec: { label, stroke: colour, width: 1.75, points: { show: false }, spanGaps: false, ...more },
  });
  const quantiles = (first) => [
    series("p50", first, css("--c0")),
    series("p95", first + 1, css("--c1")),
    series("p99", first + 2, css("--c2")),
  ];
  const shares = () =>
    tenants.flatMap((tenant, i) => [
      series(tenant.name, FIXED + 2 * i, css(`--c${tenant.colour}`)),
      series(`${tenant.name}, entitled`, FIXED + 2 * i + 1, css(`--c${tenant.colour}`), { dash: [4, 4], width: 1, alpha: 0.7, class: "entitled" }),
    ]);
  const CHARTS = {
    share: { series: shares, range: () => [0, 100], unit: (v) => `${v}%` },
    throughput: { series: () => [series("tokens/s", 1, css("--c0"), { fill: css("--c0-soft") })], unit: (v) => short(v) },
    first: { series: () => quantiles(3), unit: time },
    between: { series: () => quantiles(6), unit: time },
    fairness: { series: () => [series("Jain index", 2, css("--c0"))], range: () => [0, 1], unit: (v) => `${v}` },
    refused: { series: () => [series("shed", 9, css("--c1")), series("throttled", 10, css("--c4"))], unit: (v) => short(v) },
  };

  function short(value) {
    if (Math.abs(value) >= 1e6) return `${+(value / 1e6).toFixed(1)}M`;
    if (Math.abs(value) >= 1e4) return `${+(value / 1e3).toFixed(1)}k`;
    return `${+value.toFixed(1)}`;
  }

  function time(ms) {
    return ms >= 1000 ? `${+(ms / 1000).toFixed(2)} s` : `${+ms.toFixed(1)} ms`;
  }

  const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

  // Always some height, also while everything is zero.
  const fromZero = (_, low, high) => [0, high > 0 ? high * 1.1 : 1];

  function axes(chart) {
    const shared = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const times = (_, splits, axis, space, step) => splits.map((at) => clock(at).slice(0, step < 60 ? 8 : 5));
    return [
      { ...shared, grid: { show: false }, space: 75, size: 26, gap: 4, values: times },
      { ...shared, size: 56, space: 32, values: (_, splits) => splits.map((v) => (v === null ? "" : chart.unit(v))) },
    ];
  }

  function draw() {
    for (const { plot } of plots) plot.destroy();
    plots = [];
    if (!columns.length) return;
    for (const figure of document.querySelectorAll("[data-chart]")) {
      const chart = CHARTS[figure.dataset.chart];
      const wanted = chart.series();
      const place = figure.querySelector(".plot");
      const plot = new uPlot(
        {
          width: place.clientWidth,
          height: HEIGHT,
          legend: { show: true, live: true },
          hooks: { setCursor: [showLatest] },
          cursor: { points: { size: 6 }, drag: { x: false, y: false }, focus: { prox: 24 } },
          scales: { x: { time: true, range: window15 }, y: { range: chart.range ?? fromZero } },
          axes: axes(chart),
          series: [
            { label: "Time", value: (_, at) => (at === null ? "–" : clock(at)) },
            ...wanted.map(({ spec }) => ({ ...spec, value: (_, v) => (v === null || v === undefined ? "–" : chart.unit(+v.toFixed(3))) })),
          ],
        },
        pick(wanted),
        place,
      );
      showLatest(plot);
      plots.push({ plot, wanted, place });
    }
  }

  // The legend reads what is under the pointer, and the latest while there is none.
  function showLatest(plot) {
    if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: columns[0].length - 1 });
  }

  // The last quarter of an hour, however little of it there is yet.
  function window15() {
    const last = columns[0].at(-1);
    return [last - Math.max(60, Math.min(KEEP, last - columns[0][0])), last];
  }

  const pick = (wanted) => [columns[0], ...wanted.map(({ column }) => columns[column])];

  document.addEventListener("forebay:history", (event) => {
    const message = JSON.parse(event.detail.data);
    tenants = message.tenants;
    columns = message.columns.map((column) => [...column]);
    draw();
  });

  document.addEventListener("forebay:sample", (event) => {
    const row = JSON.parse(event.detail.data);
    if (!columns.length) {
      columns = row.map((value) => [value]);
      draw();
      return;
    }
    row.forEach((value, i) => {
      columns[i].push(value);
      if (columns[i].length > KEEP) columns[i].shift();
    });
    for (const { plot, wanted } of plots) {
      plot.setData(pick(wanted));
      showLatest(plot);
    }
  });

  document.addEventListener("forebay:theme", draw);
  new ResizeObserver(() => {
    for (const { plot, place } of plots) {
      if (place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: HEIGHT });
    }
  }).observe(document.getElementById("charts"));
})();
