// Conversations and documents in the browser's own database: they survive a reload, and never leave this machine
// but for the server they are talked about with.

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("gsa", 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("conversations", { keyPath: "id" });
    request.result.createObjectStore("documents", { keyPath: "id" });
  };
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function ask(store, mode, make) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const request = make(database.transaction(store, mode).objectStore(store));
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

export const all = (store) => ask(store, "readonly", (objects) => objects.getAll());
export const put = (store, value) => ask(store, "readwrite", (objects) => objects.put(value));
export const drop = (store, id) => ask(store, "readwrite", (objects) => objects.delete(id));

/** Settings are few and small: they are kept as one value. */
export const settings = {
  read: (defaults) => {
    try {
      return { ...defaults, ...JSON.parse(localStorage.getItem("gsa-settings") ?? "{}") };
    } catch {
      return { ...defaults };
    }
  },
  write: (values) => localStorage.setItem("gsa-settings", JSON.stringify(values)),
};
