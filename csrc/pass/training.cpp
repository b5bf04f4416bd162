// The usual training pass, step by step and under the names of syncbn/training.py. Before the
// collective a step may return nothing: then Python makes the pass, which needs more.
//
// The state of groups and all objects of Python are touched with the GIL, which operators and
// collectives release.
#include "training.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/profiler.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <memory>

#include "arguments.h"
#include "group.h"
#include "operators.h"
#include "python.h"

namespace syncbn::pass {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether a mode, a transform or a trace is active, or the profiler, which gets labels.
bool is_observed() {
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 || torch::jit::tracer::isTracing() ||
         c10::impl::tls_is_dispatch_key_included(
             c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         torch::autograd::profiler::profilerEnabled();
}

// Whether the operators of csrc/cpu and csrc/cuda take the tensor.
bool has_operators(const Tensor& tensor) {
  const bool is_built = tensor.is_cpu() || (tensor.is_cuda() && operators().has_cuda);
  return is_built && tensor.layout() == at::kStrided && !tensor.is_nested() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// The memory format of a dense tensor; nothing for other strides.
std::optional<at::MemoryFormat> dense_format(const Tensor& tensor) {
  if (tensor.is_contiguous()) {
    return at::MemoryFormat::Contiguous;
  }
  const at::MemoryFormat format = tensor.suggest_memory_format();
  return tensor.is_contiguous(format) ? std::optional(format) : std::nullopt;
}

// Returns the input and its arguments, if nothing about them needs Python.
std::optional<Arguments> read_usual(const py::object& input, const py::tuple& arguments) {
  if (!THPVariable_CheckExact(input.ptr()) || is_observed()) {
    return std::nullopt;
  }
  const Tensor& tensor = THPVariable_Unpack(input.ptr());
  if (!has_operators(tensor) || tensor.dim() < 2) {
    return std::nullopt;
  }
  const auto format = dense_format(tensor);
  if (!format) {
    return std::nullopt;
  }
  auto read = Arguments::read(tensor, arguments);
  if (read && read->residual &&
      !(has_operators(*read->residual) && read->residual->is_contiguous(*format))) {
    return std::nullopt;
  }
  return read;
}

// Calls an operator without autograd and without the GIL.
template <typename... Operands>
torch::jit::Stack run(const Operator& op, const Operands&... operands) {
  const py::gil_scoped_release no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return op(operands...);
}

// Returns a gradient in the input's memory format.
Tensor as_dense(const Tensor& gradient, at::MemoryFormat format) {
  const py::gil_scoped_release no_gil;
  return gradient.contiguous(format);
}

constexpr auto kNone = std::nullopt;

// The sums of the statistics over the ranks.
Tensor sum_statistics(const Arguments& a, const Step& step, const py::object& record,
                      const py::tuple& given) {
  torch::jit::Stack message;
  try {
    message =
        run(operators().batch_norm_stats, a.input, step.tail(), a.weight, a.bias, a.running_mean,
            a.running_var, a.num_batches_tracked, a.momentum, a.residual, kNone);
  } catch (const std::exception&) {
    throw_aborted(std::current_exception(), record, a.input, given);
  }
  return all_reduce(step, message[0].toTensor(), record);
}

// The operands of a backward pass's sums.
struct Reduction {
  Tensor grad_output, input, mean, invstd;
  at::MemoryFormat format;
  at::ScalarType weight_dtype, bias_dtype;
  int64_t activation = 0;
  double negative_slope = 0;
  OptionalTensor constants = std::nullopt;  // with an activation, but not after a residual
  OptionalTensor output = std::nullopt;     // with an activation after a residual
};

// The sums of the gradients over the ranks, grad_weight, grad_bias and dz.
torch::jit::Stack sum_gradients(const Reduction& r, const Step& step, const py::object& record) {
  torch::jit::Stack sums;
  try {
    const Tensor dy = as_dense(r.grad_output, r.format);
    if (r.output) {
      sums = run(operators().batch_norm_backward_reduce_dz, dy, r.input, r.mean, r.invstd,
                 r.weight_dtype, r.bias_dtype, step.tail(), kNone, r.activation, r.negative_slope,
                 kNone, r.output, kNone);
    } else {
      sums =
          run(operators().batch_norm_backward_reduce, dy, r.input, r.mean, r.invstd, r.weight_dtype,
              r.bias_dtype, step.tail(), r.constants, r.activation, r.negative_slope, kNone);
      sums.emplace_back(dy);
    }
  } catch (const std::exception&) {
    throw_aborted(std::current_exception(), record, r.input);
  }
  sums[0] = all_reduce(step, sums[0].toTensor(), record);
  return sums;
}

// The part of a node's context that is no tensor. Torch may free a node without the GIL, which
// these objects of Python take.
struct Kept {
  c10::SafePyObject record;
  c10::SafePyObject group;  // None, or a group that nobody but this graph may hold
  double eps;
  std::optional<at::ScalarType> bias_dtype;
  int64_t activation;
  double negative_slope;
  bool has_residual;

  Kept(py::object record, py::object group, const Arguments& a)
      : record(record.release().ptr(), getPyInterpreter()),
        group(group.release().ptr(), getPyInterpreter()),
        eps(a.eps),
        activation(a.activation),
        negative_slope(a.negative_slope),
        has_residual(a.residual.has_value()) {
    if (a.bias) {
      bias_dtype = a.bias->scalar_type();
    }
  }

  // Torch's compiler of backward passes takes tensors and numbers of a context, and no other
  // object: so this is the memory of a tensor, which deletes it.
  static Tensor in_tensor(std::unique_ptr<Kept> kept) {
    const auto deleter = [](void* memory) { delete static_cast<Kept*>(memory); };
    return at::from_blob(kept.release(), {sizeof(Kept)}, deleter, at::kByte);
  }
  static const Kept& of(const Tensor& tensor) {
    return *static_cast<const Kept*>(tensor.const_data_ptr());
  }
};

// A backward pass: a node's context, without its node.
struct Backward {
  const Kept& kept;
  variable_list saved;
  Tensor grad_output;
  bool needs_grad_input;

  variable_list run() const;

 private:
  const Tensor& input() const { return saved[0]; }
  const Tensor& mean() const { return saved[2]; }
  const Tensor& invstd() const { return saved[3]; }
  const Tensor& count() const { return saved[4]; }
  OptionalTensor weight() const { return optional(1); }
  OptionalTensor constants() const { return optional(6); }
  OptionalTensor output() const { return optional(8); }
  OptionalTensor optional(size_t place) const {
    const bool is_saved = place < saved.size() && saved[place].defined();
    return is_saved ? OptionalTensor(saved[place]) : std::nullopt;
  }
  bool is_usual() const;
  variable_list run_in_python() const;
  std::optional<variable_list> run_usual() const;
};

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& input, const OptionalTensor& weight,
                        const OptionalTensor& /*bias*/, const OptionalTensor& /*residual*/,
                        const torch::jit::Stack& results, std::unique_ptr<Kept>& kept) {
    const Tensor output = results[0].toTensor();
    const Tensor none;
    // In the places of syncbn/training.py, which may get them.
    variable_list saved{input, weight.value_or(none)};
    for (int i = 1; i < 4; ++i) {
      saved.push_back(results[i].toTensor());
    }
    saved.push_back(none);
    if (kept->activation != 0) {
      saved.insert(saved.end(), {kept->has_residual ? none : results[4].toTensor(), none,
                                 kept->has_residual ? output : none, none});
    }
    context->save_for_backward(std::move(saved));
    context->saved_data["kept"] = Kept::in_tensor(std::move(kept));
    return output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const Tensor kept = context->saved_data["kept"].toTensor();
    Backward backward{Kept::of(kept), {}, gradients[0], context->needs_input_grad(0)};
    const py::gil_scoped_acquire gil;
    try {
      backward.saved = context->get_saved_variables();
    } catch (const std::exception&) {  // they were changed in place, or a hook failed
      throw_unread(std::current_exception(), to_object(backward.kept.record), gradients[0]);
    }
    variable_list results = backward.run();
    results.resize(6);
    return results;
  }
};

// Memory for the constants of an activation; nothing without one.
OptionalTensor empty_constants(const Arguments& a) {
  if (a.activation == 0) {
    return std::nullopt;
  }
  const py::gil_scoped_release no_gil;
  return at::empty({2 * a.input.size(1)}, a.input.options().dtype(at::kDouble));
}

// Output, mean, invstd, count, and with an activation its constants. Nothing if Python has to make
// the pass.
std::optional<torch::jit::Stack> normalize(const Arguments& a, const py::object& record,
                                           const py::object& state, const py::tuple& given) {
  torch::jit::Stack results;
  OptionalTensor constants;
  if (state.is_none()) {
    try {
      constants = empty_constants(a);
      results = run(operators().batch_norm_forward, a.input, a.weight, a.bias, a.running_mean,
                    a.running_var, a.num_batches_tracked, a.momentum, a.eps, a.residual,
                    a.activation, a.negative_slope, constants, kNone);
    } catch (const std::exception&) {
      throw_aborted(std::current_exception(), record, a.input, given);
    }
  } else {
    const auto step = begin(state, record, a.input);
    if (!step) {
      return std::nullopt;
    }
    const Tensor totals = sum_statistics(a, *step, record, given);
    try {
      constants = empty_constants(a);
      results = run(operators().batch_norm_apply, a.input, totals, a.weight, a.bias, a.running_mean,
                    a.running_var, a.num_batches_tracked, a.momentum, a.eps, step->tail_sum,
                    step->status, a.residual, a.activation, a.negative_slope, constants, kNone);
    } catch (const std::exception&) {
      throw_in_operator(std::current_exception(), record, a.input, given);
    }
  }
  for (const OptionalTensor* written : {&a.running_mean, &a.running_var, &a.num_batches_tracked}) {
    if (written->has_value() && !(*written)->is_inference()) {
      (*written)->unsafeGetTensorImpl()->bump_version();
    }
  }
  results.emplace_back(constants);
  return results;
}

bool Backward::is_usual() const {
  return needs_grad_input && !at::GradMode::is_enabled() && !is_observed() &&
         has_operators(grad_output) && has_operators(input()) && input().dim() >= 2;
}

variable_list Backward::run() const {
  if (is_usual()) {
    if (auto gradients = run_usual()) {
      return *gradients;
    }
  }
  return run_in_python();
}

variable_list Backward::run_in_python() const {
  return run_backward(py::make_tuple(saved, to_object(kept.record), kept.eps, kept.bias_dtype,
                                     py::make_tuple(needs_grad_input), kept.activation,
                                     kept.negative_slope, kept.has_residual),
                      grad_output);
}

std::optional<variable_list> Backward::run_usual() const {
  const auto format = dense_format(input());
  if (!format) {
    return std::nullopt;
  }
  py::object record = to_object(kept.record);
  const py::object state = names().state.of(record);
  if (!state.is_none()) {
    record = names().record.call(state, names().layer.of(record), names().backward.object());
  }
  const auto step = begin(state, record, input());
  if (!step) {
    return std::nullopt;
  }
  const Reduction r{grad_output,
                    input(),
                    mean(),
                    invstd(),
                    *format,
                    weight() ? weight()->scalar_type() : at::kDouble,
                    kept.bias_dtype.value_or(at::kDouble),
                    kept.activation,
                    kept.negative_slope,
                    constants(),
                    output()};
  torch::jit::Stack results;  // grad_input, grad_weight, grad_bias, dz
  if (state.is_none() && !r.output) {
    try {
      const Tensor dy = as_dense(grad_output, *format);
      results = pass::run(operators().batch_norm_backward, dy, r.input, r.mean, r.invstd, weight(),
                          count(), r.weight_dtype, r.bias_dtype, r.constants, r.activation,
                          r.negative_slope, kNone);
      results.emplace_back(dy);
    } catch (const std::exception&) {
      throw_aborted(std::current_exception(), record, r.input);
    }
  } else {
    results = sum_gradients(r, *step, record);
    const Tensor totals = results[0].toTensor(), dz = results[3].toTensor();
    const int64_t activation = r.output ? 0 : r.activation;
    try {
      results[0] = pass::run(operators().batch_norm_backward_apply, dz, r.input, r.mean, r.invstd,
                             weight(), totals, count(), step->tail_sum, step->status, r.constants,
                             activation, r.negative_slope, kNone)[0];
    } catch (const std::exception&) {
      throw_in_operator(std::current_exception(), record, r.input);
    }
  }
  return variable_list{results[0].toTensor(), weight() ? results[1].toTensor() : Tensor(),
                       kept.bias_dtype ? results[2].toTensor() : Tensor(),
                       kept.has_residual ? results[3].toTensor() : Tensor()};
}

}  // namespace

py::object train(const py::object& input, const py::tuple& given, const py::object& record) {
  const auto arguments = read_usual(input, given);
  if (!arguments || !record.cast<const Record&>().is_forward) {
    return py::none();
  }
  const Arguments& a = *arguments;
  using torch::autograd::isFwGradDefined;
  if (isFwGradDefined(a.input) || isFwGradDefined(a.weight) || isFwGradDefined(a.bias) ||
      isFwGradDefined(a.residual)) {
    return py::none();  // Python refuses it
  }
  if (is_compiled_autograd_enabled()) {
    return py::none();
  }
  const py::object state = names().state.of(record);
  const auto results = normalize(a, record, state, given);
  if (!results) {
    return py::none();
  }
  if (!torch::autograd::compute_requires_grad(a.input, a.weight, a.bias, a.residual)) {
    return py::cast((*results)[0].toTensor());
  }
  // This graph holds its group, unless torch.distributed holds it and may destroy it.
  const bool holds_group =
      !state.is_none() && names().is_registered.of(state).is(py::handle(Py_False));
  auto kept = std::make_unique<Kept>(
      record, holds_group ? names().group.of(state) : py::object(py::none()), a);
  return py::cast(
      SyncBatchNormFunction::apply(a.input, a.weight, a.bias, a.residual, *results, kept));
}

py::object sum_statistics(const py::object& input, const py::tuple& given,
                          const py::object& record) {
  const py::object state = names().state.of(record);
  if (state.is_none() || !record.cast<const Record&>().is_forward) {
    return py::none();
  }
  const auto arguments = read_usual(input, given);
  if (!arguments) {
    return py::none();
  }
  const auto step = begin(state, record, arguments->input);
  return step ? py::cast(sum_statistics(*arguments, *step, record, given)) : py::object(py::none());
}

py::object sum_gradients(const Tensor& grad_output, const Tensor& input, const Tensor& mean,
                         const Tensor& invstd, at::ScalarType weight_dtype,
                         at::ScalarType bias_dtype, const py::object& record) {
  const py::object state = names().state.of(record);
  if (state.is_none() || is_observed() || !has_operators(grad_output) || !has_operators(input)) {
    return py::none();
  }
  const auto format = dense_format(input);
  if (!format) {
    return py::none();
  }
  const auto step = begin(state, record, input);
  if (!step) {
    return py::none();
  }
  const Reduction reduction{grad_output, input, mean, invstd, *format, weight_dtype, bias_dtype};
  const auto sums = sum_gradients(reduction, *step, record);
  return py::make_tuple(sums[0].toTensor(), sums[1].toTensor(), sums[2].toTensor());
}

}  // namespace syncbn::pass
