# SPDX-License-Identifier: Apache-2.0
"""A tour in half a minute: assign, sample, audit, train."""

from equipoise_lab.demo._page import Part as Part
from equipoise_lab.demo._page import write_page as write_page
from equipoise_lab.demo._parts import PARTS as PARTS
