// What every page does by itself: say whether it is live, and ask before an action.
"use strict";
(() => {
  const line = document.getElementById("line");
  const dialog = document.getElementById("confirm");
  const say = (state, text) => {
    if (line.dataset.state !== state) {
      line.dataset.state = state;
      line.textContent = text;
    }
  };

  document.addEventListener("htmx:sse:after:connection", () => say("live", "Live"));
  for (const name of ["htmx:sse:error", "htmx:sse:close", "htmx:sse:before:connection"]) {
    document.addEventListener(name, () => say("lost", "Connecting …"));
  }
  document.addEventListener("forebay:bye", () => location.reload());

  // A dialog instead of the browser's own: it says what the buttons do, and closes with Escape.
  document.addEventListener("htmx:confirm", (event) => {
    event.preventDefault();
    document.getElementById("confirm-question").textContent = event.detail.ctx.confirm;
    dialog.returnValue = "no";
    dialog.showModal();
    dialog.addEventListener(
      "close",
      () => (dialog.returnValue === "yes" ? event.detail.issueRequest() : event.detail.dropRequest()),
      { once: true },
    );
  });

  document.addEventListener("htmx:after:swap", (event) => {
    const target = event.detail.ctx?.target;
    if (target?.id === "result") target.scrollIntoView({ block: "nearest" });
  });
})();
