// Sound for a model: the microphone, a file, or an example; converted to 16-bit samples at the model's rate.
import { button, make } from "./tools.js";

const MAX_SECONDS = 10;

export function recorder(onChange, signal) {
  const player = make("audio", { controls: true, hidden: true, ariaLabel: "The recording" }), problem = make("p", { className: "problem", role: "alert" });
  const file = make("input", { type: "file", accept: "audio/*", className: "unseen", tabIndex: -1, ariaLabel: "Sound file", on: { change: () => file.files[0] && read(() => file.files[0].arrayBuffer()) } });
  const record = button("● Record", () => toggleRecording());
  let rate = 8000, samples = null, running = null;

  async function read(load) {
    problem.textContent = "";
    try {
      const context = new OfflineAudioContext(1, 1, rate), decoded = await context.decodeAudioData(await load());
      const mono = new Float32Array(decoded.length);
      for (let c = 0; c < decoded.numberOfChannels; c++) decoded.getChannelData(c).forEach((x, i) => { mono[i] += x / decoded.numberOfChannels; });
      use(mono);
    } catch {
      problem.textContent = "the browser cannot decode this sound; choose a WAV, MP3, OGG or FLAC file";
    }
  }

  function use(mono) {
    if (mono.length > MAX_SECONDS * rate) problem.textContent = `the recording takes ${(mono.length / rate).toFixed(1)} s; its first ${MAX_SECONDS} s are used`;
    samples = Int16Array.from(mono.subarray(0, MAX_SECONDS * rate), (x) => Math.round(32767 * Math.max(-1, Math.min(1, x))));
    URL.revokeObjectURL(player.src);
    player.src = URL.createObjectURL(wave(samples, rate));
    player.hidden = false;
    onChange();
  }

  async function toggleRecording() {
    if (running) return running.stop();
    problem.textContent = "";
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true }), parts = [];
      running = new MediaRecorder(stream);
      running.addEventListener("dataavailable", ({ data }) => parts.push(data));
      running.addEventListener("stop", () => {
        for (const track of stream.getTracks()) track.stop();
        running = null;
        record.textContent = "● Record";
        read(() => new Blob(parts).arrayBuffer());
      });
      running.start();
      record.textContent = "■ Stop";
      setTimeout(() => running?.stop(), 1000 * MAX_SECONDS);
    } catch {
      problem.textContent = "the browser gives no access to a microphone; allow it, or choose a file";
    }
  }

  signal.addEventListener("abort", () => running?.stop());
  const example = () => read(async () => (await fetch("digits.wav", { signal })).arrayBuffer());
  return {
    box: make("div", { className: "recorder" }, make("div", { className: "transport" }, record, button("File …", () => file.click()), button("Example", example), file), player, problem),
    isEmpty: () => samples === null,
    setRate(value) { if (value !== rate) samples = null; rate = value; if (samples === null) example(); },
    samples() { // in base64
      const bytes = new Uint8Array(samples.buffer);
      let text = "";
      for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
      return btoa(text);
    },
    player,
  };
}

// Return 16-bit samples as a WAV file.
function wave(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length)), text = (at, letters) => [...letters].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, sample, true));
  return new Blob([view], { type: "audio/wav" });
}
