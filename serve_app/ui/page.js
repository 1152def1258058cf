() => {
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    // An answer may hold HTML with the same id.
    const own = [...document.querySelectorAll("#stop:not(.hidden)")].find((stop) => !stop.closest("#answers"));
    own?.click();
  });
  const sheet = document.createElement("button");
  sheet.id = "theme";
  sheet.type = "button";
  const name = () => (sheet.textContent = document.body.classList.contains("dark") ? "Light" : "Dark");
  sheet.addEventListener("click", () => {
    document.body.classList.toggle("dark");
    name();
  });
  name();
  document.body.append(sheet);
  // On a phone the settings would cover the whole page: begin with the chat.
  let tries = 100;
  const close = () => {
    const toggle = document.querySelector(".sidebar.open .toggle-button");
    if (toggle) toggle.click();
    else if (tries--) setTimeout(close, 50);
  };
  if (window.innerWidth < 700) close();
}
