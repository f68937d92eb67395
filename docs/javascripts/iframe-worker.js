// A page opened from a folder (file://) may not start a Worker: the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script src="${new URL(url, document.baseURI)}"><\/script>`;
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inner = frame.contentWindow;
          const answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inner.postMessage = answer;
          inner.importScripts = (...urls) => Promise.all(urls.map((each) => load(inner.document, each)));
          resolve(inner);
        };
      });
      (document.body || document.documentElement).append(frame);
    }

    postMessage(data) {
      this.ready.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };

  function load(page, url) {
    return new Promise((resolve, reject) => {
      const script = page.createElement("script");
      Object.assign(script, { src: url, onload: resolve, onerror: reject });
      page.body.append(script);
    });
  }
}
