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

/** Keeps a conversation together with what another tab has added to it meanwhile, and brings that into it as well. Both
 * happen in one transaction, so that no tab comes in between. */
export async function merge(conversation) {
  const database = await opened;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction("conversations", "readwrite");
    const objects = transaction.objectStore("conversations");
    objects.get(conversation.id).onsuccess = ({ target }) => {
      for (const part of ["nodes", "chosen"]) conversation[part] = { ...target.result?.[part], ...conversation[part] };
      objects.put(conversation);
    };
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

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
