// An input as kernels see it: a dense (outer, channels, inner) array.
//
// With inner == 1 the array is a row-major matrix (rows, channels): a 2-D input, a channels-last
// input, or a map of one pixel. Any other array is planar, such as NCHW. An empty input is a matrix
// without rows.
#pragma once

#include <cstdint>
#include <optional>

namespace syncbn {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Geometry {
  int64_t outer;
  int64_t channels;
  int64_t inner;

  int64_t per_channel() const { return outer * inner; }
  int64_t numel() const { return outer * channels * inner; }
  bool is_matrix() const { return inner == 1; }
  bool operator==(const Geometry& other) const {
    return outer == other.outer && channels == other.channels && inner == other.inner;
  }
};

namespace detail {

// Returns whether the array is dense: contiguous or, with channels_fastest, channels-last. The
// stride of a dimension of size one does not matter.
inline bool is_dense(const int64_t* sizes, const int64_t* strides, int64_t dim,
                     bool channels_fastest) {
  int64_t expected = 1;
  const auto matches = [&](int64_t d) {
    if (sizes[d] != 1 && strides[d] != expected) {
      return false;
    }
    expected *= sizes[d];
    return true;
  };
  if (channels_fastest && !matches(1)) {
    return false;
  }
  for (int64_t d = dim - 1; d >= 0; --d) {
    if (!(channels_fastest && d == 1) && !matches(d)) {
      return false;
    }
  }
  return true;
}

}  // namespace detail

// Returns nothing if the tensor is neither contiguous nor channels-last. Needs dim >= 2.
inline std::optional<Geometry> find_geometry(const int64_t* sizes, const int64_t* strides,
                                             int64_t dim) {
  Geometry geometry{sizes[0], sizes[1], 1};
  for (int64_t d = 2; d < dim; ++d) {
    geometry.inner *= sizes[d];
  }
  if (geometry.numel() == 0) {
    return Geometry{0, sizes[1], 1};
  }
  if (detail::is_dense(sizes, strides, dim, /*channels_fastest=*/false)) {
    if (geometry.channels == 1) {  // one plane holds all values
      geometry.inner *= geometry.outer;
      geometry.outer = 1;
    }
    return geometry;
  }
  if (detail::is_dense(sizes, strides, dim, /*channels_fastest=*/true)) {
    geometry.outer *= geometry.inner;
    geometry.inner = 1;
    return geometry;
  }
  return std::nullopt;
}

}  // namespace syncbn
