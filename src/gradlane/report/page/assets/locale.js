"use strict";
// A browser started under LANG=C or POSIX names a language that Intl refuses, with which uPlot formats numbers as it loads.
try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en-US" });
}
