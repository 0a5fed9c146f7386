"""The explorer: an interactive web page that shows which queries form a group and which keys it selects.

`create_app` is the server around a model and some images; `serve` is `dgt explore`, `export` its
`--export`: the same page as files. The page itself is plain HTML, CSS and JavaScript in `static`,
and asks nothing of any other host.
"""

from dgt.explorer.album import Album
from dgt.explorer.launch import export, serve
from dgt.explorer.server import create_app
from dgt.explorer.views import Explorer

__all__ = ["Album", "Explorer", "create_app", "export", "serve"]
