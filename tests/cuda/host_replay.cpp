// The kernels' masks and layouts, compiled for the host from the kernels' own headers, for test_host_replay.py.
// TILE_WIDTHS: the widths of key tiles in use, as in "80, 128".
#include <type_traits>

#include "../../csrc/cuda/common/row_mask.cuh"
#include "../../csrc/cuda/ptx/layout.cuh"

using namespace magi;
using namespace magi::cuda;

namespace {

// Both rows' masks of a thread, as a consumer of the forward kernel makes them.
template <int BN>
struct Masks {
  RowMask<BN> of_row[2];

  void add(const TileBand* bands, int n_band, const int (&row)[2], int col_start, int lane) {
    for (int i = 0; i < n_band; ++i)
      for (int r = 0; r < 2; ++r) of_row[r].add(bands[i], row[r], col_start, first_column(lane));
  }
};

template <int BN>
void row_bits(const TileBand* bands, int n_band, const int* rows, int n_rows, int col_start, uint8_t* out) {
  for (int i = 0; i < n_rows; ++i)
    for (int lane = 0; lane < 32; ++lane) {
      Masks<BN> masks;
      masks.add(bands, n_band, {rows[i], rows[i]}, col_start, lane);
      for (int e = 0; e < BN / 4; ++e) *out++ = masks.of_row[0].shows(e);
    }
}

template <int BN>
void tile(const TileBand* bands, int n_band, int first_token, int heads_shift, int tile_rows, int col_start,
          uint8_t* times_shown) {
  for (int thread = 0; thread < 2 * tile_rows; ++thread) {
    const int warpgroup = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
    const int row = warpgroup * 64 + first_row(warp, lane);
    Masks<BN> masks;
    masks.add(bands, n_band, {first_token + (row >> heads_shift), first_token + ((row + 8) >> heads_shift)}, col_start,
              lane);
    for (int r = 0; r < 2; ++r)
      for (int e = 0; e < BN / 4; ++e)
        if (n_band == 0 || masks.of_row[r].shows(e))
          ++times_shown[(row + 8 * r) * BN + 8 * (e / 2) + first_column(lane) + e % 2];
  }
}

// Calls what the width selects; false if it is not in use.
template <int... BN, class F>
bool for_width(int width, F f) {
  return ((BN == width && (f(std::integral_constant<int, BN>{}), true)) || ...);
}

}  // namespace

extern "C" {

// out [n_rows, 32 lanes, width / 4]: whether a lane's element of a row is visible.
bool host_row_bits(int width, const TileBand* bands, int n_band, const int* rows, int n_rows, int col_start,
                   uint8_t* out) {
  return for_width<TILE_WIDTHS>(width, [&](auto n) { row_bits<n>(bands, n_band, rows, n_rows, col_start, out); });
}

// times_shown [tile_rows, width]: how many threads see that element of a tile.
bool host_tile(int width, const TileBand* bands, int n_band, int first_token, int heads_shift, int tile_rows,
               int col_start, uint8_t* times_shown) {
  return for_width<TILE_WIDTHS>(
      width, [&](auto n) { tile<n>(bands, n_band, first_token, heads_shift, tile_rows, col_start, times_shown); });
}

uint32_t host_swizzled(uint32_t byte) { return swizzled(byte); }
uint64_t host_matrix(uint32_t address, uint32_t panel_bytes) { return matrix(address, matrix_layout(panel_bytes)); }
int host_k_contiguous_step(int i, int rows) { return k_contiguous_step(i, rows); }
int host_n_contiguous_step(int i) { return n_contiguous_step(i); }
int host_first_row(int warp, int lane) { return first_row(warp, lane); }
int host_first_column(int lane) { return first_column(lane); }
int host_accumulator_index(int i, int r) { return accumulator_index(i, r); }

}  // extern "C"
