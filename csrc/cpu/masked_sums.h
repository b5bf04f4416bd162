// Sums over the places of an item that a mask leaves: see mask.h.
#pragma once

#include <memory>

#include "channel_sums.h"
#include "mask.h"

namespace syncbn::cpu {

// Values of a tensor in a piece, which the caches hold beside those of the other tensors.
constexpr int64_t kPieceValues = 4096;

// What takes the place of a tensor's values at masked places: a value for each of the item's
// channels; null for zeros. They must give terms of zero.
template <template <typename> class Formula, typename T>
using Fills = std::array<const T*, SummedTensors<Formula, T>::kInputs>;

// A tensor of each kind in a piece.
template <template <typename> class Formula, typename T>
class PieceMemory {
 public:
  static constexpr int kInputs = SummedTensors<Formula, T>::kInputs;

  explicit PieceMemory(int64_t values)
      : values_(values), memory_(new T[(kInputs + Formula<T>::kStores) * values]) {}

  T* input(int i) { return &memory_[i * values_]; }
  T* output() { return Formula<T>::kStores ? input(kInputs) : nullptr; }
  SummedTensors<Formula, T> tensors() {
    SummedTensors<Formula, T> tensors{};
    for (int i = 0; i < kInputs; ++i) {
      tensors.inputs[i] = input(i);
    }
    tensors.output = output();
    return tensors;
  }

 private:
  int64_t values_;
  std::unique_ptr<T[]> memory_;
};

// One channel of planes. Constants are those of the item's channel.
template <template <typename> class Formula, typename T>
void masked_planar_sums(const SummedTensors<Formula, T>& tensors, const uint8_t* mask,
                        const Fills<Formula, T>& fills, const Geometry& geometry, const Item& item,
                        const Formula<const compute_t<T>*>& constants, double* weights,
                        double* products) {
  PieceMemory<Formula, T> memory(std::min(kPieceValues, item.length));
  const SummedTensors<Formula, T> piece = memory.tensors();
  *weights = 0;
  *products = 0;
  for (int64_t done = 0; done < item.length; done += kPieceValues) {
    const int64_t begin = item.begin + done;
    const int64_t count = std::min(kPieceValues, item.length - done);
    for (int i = 0; i < memory.kInputs; ++i) {
      const T fill = fills[i] != nullptr ? *fills[i] : T{};
      dispatch_isa<SelectPlanes<T>>(tensors.inputs[i], mask, &geometry, item.channel, begin, count,
                                    fill, memory.input(i));
    }
    const Geometry of_piece{1, 1, count};
    const Item all{0, 0, 1, 0, count};
    double weight;
    double product;
    dispatch_isa<PlanarSums<Formula, T>>(&piece, &of_piece, &all, &constants, &weight, &product);
    *weights += weight;
    *products += product;
    if constexpr (Formula<T>::kStores) {
      const T* from = memory.output();
      for (Spans spans(geometry, item.channel, begin, count); spans.left > 0; spans.next()) {
        std::copy_n(from, spans.length(), tensors.output + spans.offset);
        from += spans.length();
      }
    }
  }
}

// The channels of an item of rows. Constants are those of the item's channels.
template <template <typename> class Formula, typename T>
void masked_row_sums(const SummedTensors<Formula, T>& tensors, const uint8_t* mask,
                     const Fills<Formula, T>& fills, const Geometry& geometry, const Item& item,
                     const Formula<const compute_t<T>*>& constants, double* weights,
                     double* products) {
  const int64_t inner = geometry.inner;
  const int64_t stride = geometry.channels * inner;
  const int64_t width = item.channels * inner;
  const int64_t piece_rows = std::min(round_up(ceil_div(kPieceValues, width), kGroup), item.length);
  PieceMemory<Formula, T> memory(piece_rows * width);
  const SummedTensors<Formula, T> piece = memory.tensors();
  T fill_rows[SummedTensors<Formula, T>::kInputs][kMaxColumns] = {};
  for (int i = 0; i < memory.kInputs; ++i) {
    for (int64_t column = 0; fills[i] != nullptr && column < width; ++column) {
      fill_rows[i][column] = fills[i][column / inner];
    }
  }
  uint8_t lanes[kMaxColumns];
  double piece_weights[kMaxColumns];
  double piece_products[kMaxColumns];
  std::fill(weights, weights + item.channels, 0);
  std::fill(products, products + item.channels, 0);
  for (int64_t done = 0; done < item.length; done += piece_rows) {
    const int64_t rows = std::min(piece_rows, item.length - done);
    const int64_t first_row = item.begin + done;
    const int64_t at = first_row * stride + item.channel * inner;
    const uint8_t* const of_rows = mask + first_row * inner;
    int64_t copied = 0;
    for (int i = 0; i < memory.kInputs; ++i) {
      dispatch_isa<SelectRows<T>>(tensors.inputs[i] + at, stride, width, inner, of_rows, rows,
                                  &fill_rows[i][0], &lanes[0], memory.input(i), &copied);
    }
    const Geometry of_piece{copied, item.channels, inner};
    const Item all{0, 0, item.channels, 0, copied};
    if (copied > 0) {
      dispatch_isa<RowSums<Formula, T>>(&piece, &of_piece, &all, &constants, &piece_weights[0],
                                        &piece_products[0]);
      for (int64_t c = 0; c < item.channels; ++c) {
        weights[c] += piece_weights[c];
        products[c] += piece_products[c];
      }
    }
    if constexpr (Formula<T>::kStores) {
      const T* from = memory.output();
      for (int64_t row = 0; row < rows; ++row) {
        T* const to = tensors.output + at + row * stride;
        if (inner == 1 && of_rows[row] == 0) {
          std::fill_n(to, width, T{});
        } else {
          std::copy_n(from, width, to);
          from += width;
        }
      }
    }
  }
}

}  // namespace syncbn::cpu
