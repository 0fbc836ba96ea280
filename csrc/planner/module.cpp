// Python bindings: torch_magi._planner. Arrays in, arrays out; bands are int64 [n, 7].
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "planner.h"

namespace py = pybind11;
using namespace magi;
using Int64Array = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using Int32Array = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

namespace {

static_assert(sizeof(Band) == 7 * sizeof(int64_t));

void check_width(const Int64Array& a, const char* name, int64_t width) {
  if (a.ndim() != 2 || a.shape(1) != width)
    throw std::invalid_argument(std::string(name) + " must have shape [n, " + std::to_string(width) + "]");
}

Bands bands_of(const Int64Array& a) {
  check_width(a, "bands", 7);
  Bands out(a.shape(0));
  if (!out.empty()) std::memcpy(static_cast<void*>(out.data()), a.data(), out.size() * sizeof(Band));
  for (const Band& b : out)
    if (b.step < 1) throw std::invalid_argument("the step of a band must be positive, got " + std::to_string(b.step));
  return out;
}

Ranges ranges_of(const Int64Array& a) {
  check_width(a, "ranges", 2);
  Ranges out;
  for (py::ssize_t i = 0; i < a.shape(0); ++i) out.push_back({a.at(i, 0), a.at(i, 1)});
  return out;
}

std::vector<int64_t> ints_of(const Int64Array& a) { return {a.data(), a.data() + a.size()}; }

// An array over the vector's own memory, one row per element.
template <typename Scalar, typename Row>
py::array_t<Scalar> rows(std::vector<Row> v) {
  constexpr py::ssize_t width = sizeof(Row) / sizeof(Scalar);
  auto* kept = new std::vector<Row>(std::move(v));
  const py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<Row>*>(p); });
  return py::array_t<Scalar>({py::ssize_t(kept->size()), width}, reinterpret_cast<Scalar*>(kept->data()), owner);
}

// The rows of such an array.
template <typename Row>
std::vector<Row> structs(const Int32Array& a, const char* name) {
  constexpr py::ssize_t width = sizeof(Row) / sizeof(int32_t);
  if (a.ndim() != 2 || a.shape(1) != width)
    throw std::invalid_argument(std::string(name) + " must have shape [n, " + std::to_string(width) + "]");
  std::vector<Row> out(a.shape(0));
  if (!out.empty()) std::memcpy(out.data(), a.data(), out.size() * sizeof(Row));
  return out;
}

template <typename Scalar>
py::array_t<Scalar> flat(const std::vector<Scalar>& v) {
  py::array_t<Scalar> out(py::ssize_t(v.size()));
  if (!v.empty()) std::memcpy(out.mutable_data(), v.data(), v.size() * sizeof(Scalar));
  return out;
}

SetOp op_of(const std::string& op) {
  if (op == "or") return SetOp::kOr;
  if (op == "and") return SetOp::kAnd;
  if (op == "sub") return SetOp::kSub;
  throw std::invalid_argument("op must be 'or', 'and' or 'sub', got '" + op + "'");
}

// Sorted intervals of each row in [q0, q1) as (indptr, intervals).
py::tuple row_intervals(const Int64Array& bands, int64_t q0, int64_t q1) {
  const int64_t n = std::max<int64_t>(q1 - q0, 0);
  std::vector<std::pair<int64_t, Range>> found;
  for (const Piece& p : pieces(bands_of(bands)))
    for (int64_t q = std::max(p.a, q0); q < std::min(p.b, q1); ++q)
      found.push_back({q - q0, {p.lo + p.slo * (q - p.a), p.hi + p.shi * (q - p.a)}});
  std::sort(found.begin(), found.end());
  std::vector<int64_t> indptr(n + 1, 0);
  Ranges intervals;
  for (const auto& f : found) {
    ++indptr[f.first + 1];
    intervals.push_back(f.second);
  }
  for (int64_t i = 0; i < n; ++i) indptr[i + 1] += indptr[i];
  return py::make_tuple(flat(indptr), rows<int64_t>(intervals));
}

py::array_t<int64_t> block_area_matrix(const Int64Array& bands, const Int64Array& q_edges, const Int64Array& k_edges) {
  if (!q_edges.size() || !k_edges.size()) throw std::invalid_argument("q_edges and k_edges must begin with 0");
  const auto areas = block_areas(bands_of(bands), ints_of(q_edges), ints_of(k_edges));
  return flat(areas).reshape({q_edges.size() - 1, k_edges.size() - 1});
}

Int64Array from_dense_array(const py::array_t<bool, py::array::c_style | py::array::forcecast>& mask) {
  if (mask.ndim() != 2) throw std::invalid_argument("the mask must be a matrix");
  return rows<int64_t>(from_dense(reinterpret_cast<const uint8_t*>(mask.data()), mask.shape(0), mask.shape(1)));
}

Int64Array shift(const Int64Array& a, int64_t dq, int64_t dk) {
  Bands out = bands_of(a);
  for (Band& b : out) {
    b.q0 += dq, b.q1 += dq, b.k0 += dk, b.k1 += dk;
    if (b.dlo != -kInf) b.dlo += dk - dq;
    if (b.dhi != kInf) b.dhi += dk - dq;
  }
  return rows<int64_t>(out);
}

py::tuple tile_plan_arrays(const Int64Array& bands, int64_t n_rows, int64_t tile_rows, int64_t tile_cols,
                           int64_t col_align) {
  TilePlan p = tile_plan(bands_of(bands), n_rows, tile_rows, tile_cols, col_align);
  return py::make_tuple(rows<int32_t>(std::move(p.items)), rows<int32_t>(std::move(p.runs)),
                        rows<int32_t>(std::move(p.bands)));
}

py::tuple split_item_arrays(const Int32Array& items, const Int32Array& runs, int32_t tile_cols, int64_t max_tiles) {
  TilePlan p;
  p.items = structs<TileItem>(items, "items"), p.runs = structs<TileRun>(runs, "runs");
  auto splits = split_items(p, tile_cols, max_tiles);
  return py::make_tuple(rows<int32_t>(std::move(p.items)), rows<int32_t>(std::move(p.runs)),
                        rows<int32_t>(std::move(splits)));
}

py::tuple layer_run_arrays(const Int32Array& items, const Int32Array& runs, const Int32Array& bands) {
  TilePlan p{structs<TileItem>(items, "items"), structs<TileRun>(runs, "runs"), structs<TileBand>(bands, "bands")};
  layer_runs(p);
  return py::make_tuple(rows<int32_t>(std::move(p.items)), rows<int32_t>(std::move(p.runs)),
                        rows<int32_t>(std::move(p.bands)));
}

py::array_t<int32_t> dispatch(const std::string& kind, const Int64Array& areas, int64_t n_ranks, bool uneven,
                              bool last_is_short) {
  if (n_ranks < 1) throw std::invalid_argument("n_ranks must be positive, got " + std::to_string(n_ranks));
  if (kind == "sequential") return flat(dispatch_sequential(areas.size(), n_ranks));
  if (kind == "head_tail") return flat(dispatch_head_tail(areas.size(), n_ranks));
  if (kind == "min_heap") return flat(dispatch_min_heap(ints_of(areas), n_ranks, uneven, last_is_short));
  throw std::invalid_argument("dispatcher must be 'sequential', 'head_tail' or 'min_heap', got '" + kind + "'");
}

}  // namespace

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Band algebra, tile plans and dispatch: pure functions on integer arrays.";
  m.attr("INF") = kInf;
  m.def("normalize", [](const Int64Array& a) { return rows<int64_t>(normalize(bands_of(a))); }, py::arg("bands"));
  m.def(
      "combine",
      [](const Int64Array& a, const Int64Array& b, const std::string& op) {
        return rows<int64_t>(combine(bands_of(a), bands_of(b), op_of(op)));
      },
      py::arg("a"), py::arg("b"), py::arg("op"));
  m.def("transpose", [](const Int64Array& a) { return rows<int64_t>(transpose(bands_of(a))); }, py::arg("bands"));
  m.def(
      "clip",
      [](const Int64Array& a, int64_t q0, int64_t q1, int64_t k0, int64_t k1) {
        return rows<int64_t>(clip(bands_of(a), {q0, q1}, {k0, k1}));
      },
      py::arg("bands"), py::arg("q0"), py::arg("q1"), py::arg("k0"), py::arg("k1"));
  m.def("shift", &shift, py::arg("bands"), py::arg("dq"), py::arg("dk"));
  m.def("area", [](const Int64Array& a) { return area(bands_of(a)); }, py::arg("bands"));
  m.def(
      "row_areas",
      [](const Int64Array& a, const Int64Array& edges) { return flat(row_areas(bands_of(a), ints_of(edges))); },
      py::arg("bands"), py::arg("edges"));
  m.def("block_areas", &block_area_matrix, py::arg("bands"), py::arg("q_edges"), py::arg("k_edges"));
  m.def("row_intervals", &row_intervals, py::arg("bands"), py::arg("q0"), py::arg("q1"));
  m.def("from_dense", &from_dense_array, py::arg("mask"));
  m.def(
      "key_ranges",
      [](const Int64Array& a, const Int64Array& q) { return rows<int64_t>(key_ranges(bands_of(a), ranges_of(q))); },
      py::arg("bands"), py::arg("q_ranges"));
  m.def(
      "remap",
      [](const Int64Array& a, const Int64Array& q, const Int64Array& k, const Int64Array& k_at) {
        if (k_at.size() != k.shape(0)) throw std::invalid_argument("k_offsets must have one entry per k range");
        return rows<int64_t>(remap(bands_of(a), ranges_of(q), ranges_of(k), ints_of(k_at)));
      },
      py::arg("bands"), py::arg("q_ranges"), py::arg("k_ranges"), py::arg("k_offsets"));
  m.def("tile_plan", &tile_plan_arrays, py::arg("bands"), py::arg("n_rows"), py::arg("tile_rows"), py::arg("tile_cols"),
        py::arg("col_align") = 1);
  m.def("split_items", &split_item_arrays, py::arg("items"), py::arg("runs"), py::arg("tile_cols"),
        py::arg("max_tiles"));
  m.def("layer_runs", &layer_run_arrays, py::arg("items"), py::arg("runs"), py::arg("bands"));
  m.def("dispatch", &dispatch, py::arg("kind"), py::arg("areas"), py::arg("n_ranks"), py::arg("uneven") = false,
        py::arg("last_is_short") = false);
}
