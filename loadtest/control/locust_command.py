"""``python -P -m loadtest.control.locust_command`` is Locust's command, whatever the working folder holds.

Python without ``-P``, and Locust when it loads a locustfile, look for modules in the working folder first: there a user's
``loadtest.py`` would stand for our package. Here our package is imported before Locust looks.
"""

from locust.main import main

if __name__ == "__main__":
    main()
