# SPDX-License-Identifier: Apache-2.0
"""Types and input checks that every layer shares."""

from equipoise._core._checks import check_balanced_matrix as check_balanced_matrix
from equipoise._core._checks import check_baseline as check_baseline
from equipoise._core._checks import check_broadcasts as check_broadcasts
from equipoise._core._checks import check_capacity as check_capacity
from equipoise._core._checks import check_enough_slots as check_enough_slots
from equipoise._core._checks import check_floating as check_floating
from equipoise._core._checks import check_fraction as check_fraction
from equipoise._core._checks import check_given as check_given
from equipoise._core._checks import check_iterations as check_iterations
from equipoise._core._checks import check_known_keywords as check_known_keywords
from equipoise._core._checks import check_mask as check_mask
from equipoise._core._checks import check_matrix as check_matrix
from equipoise._core._checks import check_no_nan as check_no_nan
from equipoise._core._checks import check_one_of as check_one_of
from equipoise._core._checks import check_one_problem as check_one_problem
from equipoise._core._checks import check_positive as check_positive
from equipoise._core._checks import check_possible as check_possible
from equipoise._core._checks import check_prices as check_prices
from equipoise._core._checks import check_row as check_row
from equipoise._core._checks import check_same_device as check_same_device
from equipoise._core._checks import check_shape as check_shape
from equipoise._core._checks import check_small_enough as check_small_enough
from equipoise._core._checks import check_unbalanced as check_unbalanced
from equipoise._core._value_checks import check_stochastic as check_stochastic
from equipoise._core._value_checks import check_temperature as check_temperature
from equipoise._core._value_checks import checked_choice as checked_choice
from equipoise._core._value_checks import checked_log_ratio as checked_log_ratio
from equipoise._core._value_checks import checked_slots as checked_slots
from equipoise._core._value_checks import checked_temperature as checked_temperature
from equipoise._core._value_checks import row_name as row_name
