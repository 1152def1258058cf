() => {
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") document.querySelector("#stop:not(.hidden)")?.click();
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
}
