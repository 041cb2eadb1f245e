def page(c): return ""
