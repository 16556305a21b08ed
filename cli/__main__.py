import sys

from xpu_ports.cli.main import main

sys.exit(main())
