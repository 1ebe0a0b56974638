"use strict";
// Charts of the runs that are not shown wait in templates; without a script the first one stays.
for (const select of document.querySelectorAll("select[data-place]")) {
  const place = document.getElementById(select.dataset.place);
  const first = [...place.childNodes];
  const show = () => {
    const open = place.querySelector("details")?.open ?? false;
    const template = document.getElementById(select.value);
    place.replaceChildren(...(template ? [template.content.cloneNode(true)] : first));
    const details = place.querySelector("details");
    if (details) details.open = open;
  };
  select.addEventListener("change", show);
  select.closest(".chooser").hidden = false;
}
