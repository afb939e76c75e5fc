// Before anything is drawn: the theme that was chosen here. A choice is no secret, so it may outlive the tab.
(() => {
  const order = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    theme = localStorage.getItem("baton-theme") ?? "auto";
  } catch { /* storage may be switched off */ }

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
      } catch { /* then it is chosen for this page only */ }
      show();
    });
  });
})();
