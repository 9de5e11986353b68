// Tour: seven steps about the current run. Every sentence is computed, and links to the view that shows it.
import { answerLine } from "./output.js";
import { saveButton } from "./save.js";
import { SAMPLING, SUBJECT, Subject, modelLayout } from "./subject.js";
import { Latest, ask, make, pane, progress, readState, ready, status } from "./tools.js";

// step: the output token that the tour explains ("": the least certain one).
const DEFAULTS = { ...SUBJECT, step: "" };

export function open(box, initial, { signal, remember }) {
  const state = readState(DEFAULTS, initial, { numbers: SAMPLING }), requests = new Latest(signal), stage = pane("tour-steps"), save = () => remember(state, DEFAULTS);
  const answer = answerLine((step) => { state.step = String(step); save(); onRun(subject.last); });
  const subject = new Subject({ state, signal, save, accepts: (model) => model.can_generate && model.layers.length > 0, onRun, onFail: (error) => stage.fail(error.message), onLoading: () => stage.loading() });
  modelLayout(box, subject, answer, make("div", { className: "bar stage-bar" }, make("p", { className: "note", textContent: "Seven computed sentences about one output token. Select another token of the output to ask about it. Head 2.5 is head 5 of layer 2, counted from 0." }), saveButton("tour")), stage);

  function onRun(run) {
    const step = subject.stepOf(state.step);
    subject.select(step);
    answer.show(run, step ?? (run.next ? null : subject.shownStep));
    stage.loading("Computing the tour …");
    requests.run((stop) => ask("tour", { ...subject.input, step }, { signal: stop, onProgress: progress }), ({ steps }) => {
      status("");
      const shared = Object.fromEntries(Object.entries(state).filter(([key, value]) => key in SUBJECT && String(value) !== String(SUBJECT[key])));
      const hrefOf = ({ panel, state: place }) => `#${panel}?${new URLSearchParams({ ...shared, ...place })}`;
      stage.show(make("ol", { className: "tour-list" }, ...steps.map((step) => make("li", {}, make("h2", { textContent: step.title }), make("p", { textContent: step.sentence }), make("div", { className: "tour-links" }, ...step.links.map((link) => make("a", { href: hrefOf(link), textContent: `${link.label} →`, ariaLabel: `${step.title}: ${link.label}` })))))));
      ready(`tour ${steps.length}`);
    }, (error) => { status(""); stage.fail(error.message); ready("error"); }, 150);
  }

  subject.open();
}
