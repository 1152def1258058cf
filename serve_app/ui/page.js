() => {
  // An answer may hold HTML with the same id.
  const own = (selector) => [...document.querySelectorAll(selector)].find((element) => !element.closest("#answers"));

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") own("#stop:not(.hidden)")?.click();
    if ((event.ctrlKey || event.metaKey) && event.shiftKey && event.key.toLowerCase() === "o") {
      event.preventDefault();
      own("#clear")?.click();
    }
  });

  const theme = document.createElement("button");
  theme.id = "theme";
  theme.type = "button";
  const name = () => (theme.textContent = document.body.classList.contains("dark") ? "Light" : "Dark");
  theme.addEventListener("click", () => {
    document.body.classList.toggle("dark");
    name();
  });
  name();
  document.body.append(theme);

  const notice = document.createElement("div");
  notice.id = "notice";
  notice.setAttribute("role", "status");
  document.body.append(notice);
  let noticeEnd;
  const notify = (text) => {
    notice.textContent = text;
    clearTimeout(noticeEnd);
    noticeEnd = setTimeout(() => (notice.textContent = ""), 8000);
  };

  // On a phone the settings would cover the whole page: show the chat.
  const showChat = () => {
    if (window.innerWidth < 700) document.querySelector(".sidebar.open .toggle-button")?.click();
  };
  let tries = 100;
  const begin = () => {
    if (document.querySelector(".sidebar.open .toggle-button")) showChat();
    else if (tries--) setTimeout(begin, 50);
  };
  begin();

  // The browser's storage holds the chats, the newest first. It is read again before each change: another tab may have changed it.
  const KEY = "serve-app-chats";
  const MAX_CHATS = 200;
  const stored = () => {
    try {
      const chats = JSON.parse(localStorage.getItem(KEY));
      return Array.isArray(chats) ? chats : [];
    } catch {
      return [];
    }
  };
  const store = (chats) => {
    // When the storage is full, up to half of the chats go, the oldest first.
    for (let kept = Math.min(chats.length, MAX_CHATS); kept >= chats.length / 2; kept--) {
      try {
        return localStorage.setItem(KEY, JSON.stringify(chats.slice(0, kept)));
      } catch {}
    }
    notify("This browser does not store the chat.");
  };
  const listing = (id) => ({ choices: stored().map((chat) => [chat.title, chat.id]), value: id });

  // A text file becomes a part of the prompt. The page sends no files.
  const MAX_FILE_BYTES = 256 * 1024;
  const quoted = (file, text) => {
    const longest = [...text.matchAll(/`+/g)].reduce((most, [run]) => Math.max(most, run.length), 2);
    const fence = "`".repeat(longest + 1);
    const language = /\.(\w+)$/.exec(file.name)?.[1] ?? "";
    return `${file.name}:\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}\n`;
  };
  const addFiles = async (files) => {
    for (const file of files) {
      let text = "\0";
      try {
        if (file.size <= MAX_FILE_BYTES) text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      } catch {}
      if (text.includes("\0")) {
        notify(`${file.name} is not a text file of up to 256 KiB.`);
        continue;
      }
      const prompt = own("#prompt textarea");
      prompt.value = [prompt.value, quoted(file, text)].filter(Boolean).join("\n\n");
      prompt.dispatchEvent(new Event("input", { bubbles: true }));
      prompt.focus();
    }
  };
  const isDrag = (event) => own("#prompt") && event.dataTransfer?.types.includes("Files");
  const marks = (marked) => document.body.classList.toggle("dropping", marked);
  document.addEventListener("dragover", (event) => {
    if (!isDrag(event)) return;
    event.preventDefault();
    marks(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget ?? marks(false));
  document.addEventListener("drop", (event) => {
    if (!isDrag(event)) return;
    event.preventDefault();
    marks(false);
    addFiles(event.dataTransfer.files);
  });

  window.serveApp = {
    listing,
    open: (id) => {
      showChat();
      return stored().find((chat) => chat.id === id) ?? null;
    },
    keep: (chat) => {
      if (chat?.id) {
        const others = stored().filter(({ id }) => id !== chat.id);
        store(chat.turns.length ? [{ ...chat, choices: [] }, ...others] : others);
      }
      return listing(chat?.id ?? null);
    },
    remove: (chat) => {
      if (!chat?.id || !confirm(`Delete the chat "${chat.title}"?`)) return [listing(chat?.id ?? null), chat];
      store(stored().filter(({ id }) => id !== chat.id));
      return [listing(null), null];
    },
    chooseFiles: () => {
      const input = document.createElement("input");
      input.type = "file";
      input.multiple = true;
      input.addEventListener("change", () => addFiles(input.files));
      input.click();
    },
    focus: () => {
      showChat();
      own("#prompt textarea")?.focus();
    },
  };
}
