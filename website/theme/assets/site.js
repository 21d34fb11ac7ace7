// What Material makes once a page is open: regions that scroll are reached by the keyboard, and landmarks have names of their own.
const mend = () => {
  document.querySelectorAll(".md-code__nav").forEach((each, at) => each.setAttribute("aria-label", `Code ${at + 1}`));
  document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset p:has(> img)").forEach((each) => {
    if (each.scrollWidth > each.clientWidth) each.tabIndex = 0;
  });
  const contents = document.querySelector(".md-nav--primary .md-nav--secondary");
  if (contents) contents.setAttribute("aria-label", "On this page");
};
const main = document.querySelector("main");
if (main) new MutationObserver(mend).observe(main, { childList: true, subtree: true });
addEventListener("resize", mend);
mend();
