"""The trainers' own code on exports of datasets that the real engine captured on the CPU."""
