"""``python -P -m loadtest.control.locust_command`` is Locust's command, whatever the working folder holds.

Python without ``-P``, and Locust when it loads a locustfile, look for modules in the working folder first, where a user's
``loadtest.py`` would hide our package. This command imports our package before Locust looks.
"""

from locust.main import main

if __name__ == "__main__":
    main()
