// Applies the chosen theme before the first paint. The choice is stored in this browser.
(() => {
  const order = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    theme = localStorage.getItem("baton-theme") ?? "auto";
  } catch { /* storage may be disabled */ }

  const show = () => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  };

  if (!order.includes(theme)) theme = "auto";
  show();
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      theme = order[(order.indexOf(theme) + 1) % order.length];
      try {
        localStorage.setItem("baton-theme", theme);
      } catch { /* the choice then ends with the page */ }
      show();
    });
  });
})();
