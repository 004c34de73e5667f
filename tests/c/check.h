/* What the clients share: checks that say what failed where, and messages whose exact result is known.
 *
 * A check that fails ends the process with 1, so that the parent, or the test that started it, sees it. */
#ifndef PEERLANE_TESTS_CHECK_H
#define PEERLANE_TESTS_CHECK_H

#include <peerlane.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FAIL(...)                                   \
  do {                                              \
    fprintf(stderr, "%s:%d: ", __FILE__, __LINE__); \
    fprintf(stderr, __VA_ARGS__);                   \
    fprintf(stderr, "\n");                          \
    fflush(stderr);                                 \
    _Exit(1);                                       \
  } while (0)

#define CHECK(condition)                                \
  do {                                                  \
    if (!(condition)) FAIL("not true: %s", #condition); \
  } while (0)

/* The call succeeds. */
#define OK(call)                                                                                              \
  do {                                                                                                        \
    peerlane_status ok_status = (call);                                                                       \
    if (ok_status != PEERLANE_SUCCESS)                                                                        \
      FAIL("%s: %s: %s", #call, peerlane_status_string(ok_status), peerlane_last_error());                    \
    if (peerlane_last_error()[0]) FAIL("%s succeeded but left the error '%s'", #call, peerlane_last_error()); \
  } while (0)

/* The call fails with this status, and the message contains this text. */
#define REFUSED(expected, text, call)                                                                         \
  do {                                                                                                        \
    peerlane_status got_status = (call);                                                                      \
    if (got_status != (expected))                                                                             \
      FAIL("%s: status %d (%s), expected %d: %s", #call, (int)got_status, peerlane_status_string(got_status), \
           (int)(expected), peerlane_last_error());                                                           \
    if (!strstr(peerlane_last_error(), (text)))                                                               \
      FAIL("%s: the message '%s' does not contain '%s'", #call, peerlane_last_error(), (text));               \
  } while (0)

static const size_t DTYPE_SIZE[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

/* Writes quarters/4 as element i. Small quarters are exact in every type; integers truncate, as PEERLANE_AVG does. */
static inline void put(void* data, size_t i, int dtype, int quarters) {
  float single = (float)quarters / 4;
  double twice = (double)quarters / 4;
  int whole = quarters / 4;
  char* at = (char*)data + i * DTYPE_SIZE[dtype];
  int8_t i8 = (int8_t)whole;
  int32_t i32 = whole;
  int64_t i64 = whole;
  uint32_t bits;
  uint16_t half;
  switch (dtype) {
    case PEERLANE_INT8:
    case PEERLANE_UINT8:
      memcpy(at, &i8, 1);
      break;
    case PEERLANE_INT32:
    case PEERLANE_UINT32:
      memcpy(at, &i32, 4);
      break;
    case PEERLANE_INT64:
    case PEERLANE_UINT64:
      memcpy(at, &i64, 8);
      break;
    case PEERLANE_FLOAT32:
      memcpy(at, &single, 4);
      break;
    case PEERLANE_FLOAT64:
      memcpy(at, &twice, 8);
      break;
    case PEERLANE_BFLOAT16:
      memcpy(&bits, &single, 4);
      half = (uint16_t)(bits >> 16);
      memcpy(at, &half, 2);
      break;
    case PEERLANE_FLOAT16: /* exponent bias 15 instead of 127, 10 bits of mantissa instead of 23 */
      memcpy(&bits, &single, 4);
      half = quarters ? (uint16_t)(((bits >> 23) - 127 + 15) << 10 | ((bits >> 13) & 0x3ff)) : 0;
      memcpy(at, &half, 2);
      break;
    default:
      FAIL("no dtype: %d", dtype);
  }
}

/* Rank's element i of a call: 1 to 3, different from call to call, so that a stale result is not taken for a new one.
 */
static inline int element(int rank, size_t i, int call) {
  return 1 + (int)((i * 7 + (size_t)rank * 5 + (size_t)call) % 3);
}

/* The oracle, in quarters. */
static inline int reduced(int n, size_t i, int call, int op) {
  int sum = 0, product = 1, most = 0, least = 4, rank;
  for (rank = 0; rank < n; rank++) {
    int value = element(rank, i, call);
    sum += value;
    product *= value;
    if (value > most) most = value;
    if (value < least) least = value;
  }
  switch (op) {
    case PEERLANE_SUM:
      return 4 * sum;
    case PEERLANE_PROD:
      return 4 * product;
    case PEERLANE_MAX:
      return 4 * most;
    case PEERLANE_MIN:
      return 4 * least;
    default:
      return 4 * sum / n; /* exact for n = 1, 2, 4 */
  }
}

static inline void fill(void* data, size_t count, int dtype, int rank, int call) {
  size_t i;
  for (i = 0; i < count; i++) put(data, i, dtype, 4 * element(rank, i, call));
}

static inline void verify(const void* data, size_t count, int dtype, int op, int n, int rank, int call) {
  size_t i, size = DTYPE_SIZE[dtype];
  for (i = 0; i < count; i++) {
    char expected[8];
    put(expected, 0, dtype, reduced(n, i, call, op));
    if (memcmp((const char*)data + i * size, expected, size))
      FAIL("rank %d of %d: element %zu of %zu is wrong (dtype %d, op %d, call %d)", rank, n, i, count, dtype, op, call);
  }
}

/* Memory of exactly this size, so that AddressSanitizer and valgrind see one byte too many. */
static inline void* exactly(size_t bytes) {
  void* data = malloc(bytes ? bytes : 1);
  if (!data) FAIL("out of memory");
  return data;
}

/* One call on own buffers, out of place or in place, checked. */
static inline void reduce_and_verify(peerlane_comm_t comm, int n, int rank, size_t count, int dtype, int op, int call,
                                     int in_place) {
  size_t bytes = count * DTYPE_SIZE[dtype];
  void *input = exactly(bytes), *output = in_place ? input : exactly(bytes);
  fill(input, count, dtype, rank, call);
  OK(peerlane_all_reduce(comm, input, output, count, (peerlane_dtype)dtype, (peerlane_op)op, NULL));
  verify(output, count, dtype, op, n, rank, call);
  if (!in_place) free(output);
  free(input);
}

#endif
