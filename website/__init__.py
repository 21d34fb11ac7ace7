"""What the documentation's site is built from, beside the pages in docs/: pictures, and pages that are made."""
