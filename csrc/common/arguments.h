// The arguments of the operators, read once from the dispatcher's stack. csrc/ops.cpp describes
// them.
#pragma once

#include <optional>
#include <tuple>

#include "activations.h"
#include "message.h"
#include "stable.h"

namespace syncbn {

// Reads arguments in the order of a schema. Each must be read once: the reader owns them.
class ArgumentReader {
 public:
  explicit ArgumentReader(const StableIValue* stack) : next_(stack) {}

  template <typename T>
  T read() {
    return torch::stable::detail::to<T>(*next_++);
  }

  template <typename T>
  ArgumentReader& operator>>(T& argument) {
    argument = read<T>();
    return *this;
  }

  int64_t num_read(const StableIValue* stack) const { return next_ - stack; }

 private:
  const StableIValue* next_;
};

inline ArgumentReader& operator>>(ArgumentReader& reader, Expectation& expectation) {
  const auto tail_sum = reader.read<std::optional<double>>();
  expectation = {tail_sum.has_value(), tail_sum.value_or(0)};
  return reader;
}

// Arguments of check_arguments, batch_norm_stats, batch_norm_apply and batch_norm_forward.
struct ForwardArguments {
  explicit ForwardArguments(ArgumentReader& reader) : input(reader.read<Tensor>()) {}

  Tensor input;
  std::optional<Tensor> totals;
  std::optional<Tensor> weight;
  std::optional<Tensor> bias;
  std::optional<Tensor> running_mean;
  std::optional<Tensor> running_var;
  std::optional<Tensor> num_batches_tracked;
  std::optional<double> momentum;
  double eps = 0;
  std::optional<Tensor> tail;
  Expectation expectation;
  std::optional<Tensor> status;
  std::optional<Tensor> residual;
  int64_t activation = 0;
  double negative_slope = 0;
  std::optional<Tensor> constants;
  std::optional<Tensor> mask;
  bool training = true;
};

// Arguments of batch_norm_backward_reduce, batch_norm_backward_reduce_dz,
// batch_norm_backward_apply and batch_norm_backward.
struct BackwardArguments {
  explicit BackwardArguments(ArgumentReader& reader)
      : grad_output(reader.read<Tensor>()),
        input(reader.read<Tensor>()),
        mean(reader.read<Tensor>()),
        invstd(reader.read<Tensor>()) {}

  Tensor grad_output;
  Tensor input;
  Tensor mean;
  Tensor invstd;
  std::optional<Tensor> weight;
  std::optional<Tensor> sums;
  std::optional<Tensor> count;
  ScalarType weight_dtype = ScalarType::Double;
  ScalarType bias_dtype = ScalarType::Double;
  std::optional<Tensor> tail;
  Expectation expectation;
  std::optional<Tensor> status;
  std::optional<Tensor> constants;
  int64_t activation = 0;
  double negative_slope = 0;
  std::optional<Tensor> residual;
  std::optional<Tensor> output;
  std::optional<Tensor> mask;
  std::optional<Tensor> dz;  // of batch_norm_backward_reduce_dz: its memory
};

struct VerifyArguments {
  Tensor sums;
  Expectation expectation;
  std::optional<double> other_tail_sum;
  std::optional<Tensor> status;
};

// The layer's arguments that the schemas of all forward operators have in this order.
inline ArgumentReader& read_layer(ArgumentReader& reader, ForwardArguments& a) {
  return reader >> a.weight >> a.bias >> a.running_mean >> a.running_var >> a.num_batches_tracked >>
         a.momentum;
}

inline ForwardArguments read_check(ArgumentReader& reader) {
  ForwardArguments a(reader);
  read_layer(reader, a) >> a.residual >> a.mask >> a.training;
  return a;
}

inline ForwardArguments read_stats(ArgumentReader& reader) {
  ForwardArguments a(reader);
  read_layer(reader >> a.tail, a) >> a.residual >> a.mask;
  return a;
}

inline ForwardArguments read_apply(ArgumentReader& reader) {
  ForwardArguments a(reader);
  a.totals = reader.read<Tensor>();
  read_layer(reader, a) >> a.eps >> a.expectation >> a.status >> a.residual >> a.activation >>
      a.negative_slope >> a.constants >> a.mask;
  return a;
}

inline ForwardArguments read_forward(ArgumentReader& reader) {
  ForwardArguments a(reader);
  read_layer(reader, a) >> a.eps >> a.residual >> a.activation >> a.negative_slope >> a.constants >>
      a.mask;
  return a;
}

inline BackwardArguments read_reduce(ArgumentReader& reader) {
  BackwardArguments a(reader);
  reader >> a.weight_dtype >> a.bias_dtype >> a.tail >> a.constants >> a.activation >>
      a.negative_slope >> a.mask;
  return a;
}

inline BackwardArguments read_reduce_dz(ArgumentReader& reader) {
  BackwardArguments a(reader);
  reader >> a.weight_dtype >> a.bias_dtype >> a.tail >> a.constants >> a.activation >>
      a.negative_slope >> a.residual >> a.output >> a.mask;
  return a;
}

inline BackwardArguments read_backward_apply(ArgumentReader& reader) {
  BackwardArguments a(reader);
  reader >> a.weight;
  a.sums = reader.read<Tensor>();
  a.count = reader.read<Tensor>();
  reader >> a.expectation >> a.status >> a.constants >> a.activation >> a.negative_slope >> a.mask;
  return a;
}

inline BackwardArguments read_backward(ArgumentReader& reader) {
  BackwardArguments a(reader);
  reader >> a.weight;
  a.count = reader.read<Tensor>();
  reader >> a.weight_dtype >> a.bias_dtype >> a.constants >> a.activation >> a.negative_slope >>
      a.mask;
  return a;
}

inline VerifyArguments read_verify(ArgumentReader& reader) {
  VerifyArguments a{reader.read<Tensor>(), {true, reader.read<double>()}, {}, {}};
  reader >> a.other_tail_sum >> a.status;
  return a;
}

// A tensor that is optional in the struct, but not in the schema of an operator.
inline const Tensor& required(const std::optional<Tensor>& tensor) {
  SYNCBN_CHECK(tensor.has_value(), "syncbn: expected a tensor, but got None");
  return *tensor;
}

namespace detail {

inline void write_results(StableIValue* /*stack*/) {}

template <typename... Results>
void write_results(StableIValue* stack, const Tensor& first, const Results&... others) {
  *stack = torch::stable::detail::from(first);
  write_results(stack + 1, others...);
}

}  // namespace detail

// An operator as the dispatcher calls it: kRead reads its arguments, kFunction returns a tuple.
template <auto kRead, auto kFunction>
void boxed(StableIValue* stack, uint64_t num_arguments, uint64_t /*num_results*/) {
  ArgumentReader reader(stack);
  auto arguments = kRead(reader);
  SYNCBN_CHECK(reader.num_read(stack) == static_cast<int64_t>(num_arguments),
               "syncbn: expected a schema of ", reader.num_read(stack), " arguments, but it has ",
               num_arguments);
  std::apply([&](const auto&... results) { detail::write_results(stack, results...); },
             kFunction(arguments));
}

}  // namespace syncbn
