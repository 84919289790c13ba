// Sets the colours before the page is painted: those of the system, unless the user chose others. A classic script, for that reason.

(() => {
  const dark = matchMedia('(prefers-color-scheme: dark)');
  const apply = () => {
    let chosen = null;
    try {
      chosen = localStorage.getItem('quire-theme');
    } catch {
      // No storage.
    }
    const isDark = chosen === 'dark' || (chosen !== 'light' && dark.matches);
    document.documentElement.dataset.theme = isDark ? 'dark' : 'light';
    window.dispatchEvent(new Event('theme'));
  };
  dark.addEventListener('change', apply);
  window.addEventListener('storage', apply);
  window.addEventListener('theme-chosen', apply);
  apply();
})();
