// Tensors of the device go in as CPU tensors over the same memory, the CPU's kernel runs, and its results come out as
// tensors of the device. On the way the operator is counted, recorded, or refused.

#include "kernel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <unordered_set>

#include "accounting.h"
#include "lines.h"
#include "recording.h"

namespace gaudi_sim {
namespace {

std::string short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "f32";
    case at::kDouble:
      return "f64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "f16";
    case at::kLong:
      return "i64";
    case at::kInt:
      return "i32";
    case at::kBool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

// Operators whose numbers become tensors on the device, so that another value is not another graph: those for which
// Gaudi's bridge does it in lazy mode.
const std::unordered_set<std::string>& operators_of_numbers() {
  static const std::unordered_set<std::string> names{
      "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "xlogy",
      "eq", "ne", "lt", "le", "gt", "ge", "clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv",
      "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"};
  return names;
}

// Operators that change what a tensor is, not what is in its memory.
const std::unordered_set<std::string>& metadata_operators() {
  static const std::unordered_set<std::string> names{
      "set_", "resize_", "resize_as_", "as_strided_", "_resize_output_", "is_set_to"};
  return names;
}

// Operators without a kernel for int64 values, from RLHF_GAUDI_SIM_NO_INT64 ("relu,topk"). No document lists those of a
// real bridge. Users have met relu (FAIL F43 of krisDlittleGiant/Self-Play-Reinforcement-learning, on a Gaudi2), and
// transformers replaces gather for these values ("Graph compile failed with synStatus 26", utils/import_utils.py).
const std::unordered_set<std::string>& operators_without_int64() {
  static const auto names = [] {
    const char* wish = std::getenv("RLHF_GAUDI_SIM_NO_INT64");
    std::istringstream text(wish == nullptr ? "gather,relu" : wish);
    std::unordered_set<std::string> result;
    for (std::string name; std::getline(text, name, ',');) {
      result.insert(name);
    }
    return result;
  }();
  return names;
}

// Operators without a generator argument draw from the CPU's default generator; lend it the device's state.
class LentGenerator {
 public:
  explicit LentGenerator(bool needed) : needed_(needed) {
    if (needed_) {
      swap();
    }
  }
  ~LentGenerator() {
    if (needed_) {
      swap();
    }
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

 private:
  static void swap() {
    auto cpu = at::detail::getDefaultCPUGenerator();
    auto own = host_generator(default_generator());
    const auto state = cpu.get_state();
    cpu.set_state(own.get_state());
    own.set_state(state);
  }
  bool needed_;
};

[[noreturn]] void refuse(const Kernel& kernel, const std::string& what, const std::string& remedy) {
  TORCH_CHECK(false, line_text(current_line()), ": ", kernel.name, " ", what, "; ", remedy);
}

// What an operator looks like in a report: its name, shapes and types, and numbers that are not the default.
Form form_of(const Kernel& kernel, const Stack& stack) {
  std::ostringstream text;
  const char* separator = " ";
  const auto add = [&](const at::Tensor& tensor) {
    if (tensor.defined()) {
      text << separator << tensor.sizes() << ' ' << short_name(tensor.scalar_type());
      separator = ", ";
    }
  };
  const auto& arguments = kernel.op.schema().arguments();
  for (size_t i = 0; i < kernel.arguments; ++i) {
    const auto& value = stack[stack.size() - kernel.arguments + i];
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        add(tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const auto& tensor : value.toOptionalTensorVector()) {
        add(tensor.value_or(at::Tensor()));
      }
    } else if (
        !value.isNone() && !value.isGenerator() && !kernel.is_operand[i] &&
        printed(value) != printed(arguments[i].default_value().value_or(c10::IValue()))) {
      text << separator << arguments[i].name() << '=' << printed(value);
      separator = ", ";
    }
  }
  return {kernel.name, text.str()};
}

std::string error_of_operators;

}  // namespace

void refuse_operators(const std::string& error) {
  error_of_operators = error;
}

Kernel::Kernel(const c10::OperatorHandle& op, const c10::OperatorHandle& host, void (*arrange)(Stack&))
    : op(op), host(host), arrange(arrange) {
  const auto& schema = op.schema();
  std::string base = schema.name().substr(schema.name().find("::") + 2);
  name = schema.name();
  hash = std::hash<std::string>()(name + "." + schema.overload_name());
  arguments = schema.arguments().size();
  results = schema.returns().size();
  mutates = schema.is_mutable();
  copies = base == "_copy_from" || base == "_copy_from_and_resize";
  indexes = base == "index";
  repeats = base == "repeat_interleave";
  const bool reads_number = base == "_local_scalar_dense";
  reads = reads_number || op.hasTag(at::Tag::data_dependent_output) ||
      (op.hasTag(at::Tag::dynamic_output_shape) && !indexes);
  const auto is_alias = [](const c10::Argument& result) { return result.alias_info() != nullptr; };
  const bool is_view = !mutates && std::any_of(schema.returns().begin(), schema.returns().end(), is_alias);
  computes = !is_view && !reads_number && metadata_operators().count(base) == 0;
  // PyTorch expects contiguous results of elementwise operators from a Gaudi (torch/_subclasses/fake_impls.py,
  // is_noncontiguous_supported), except of those that copy.
  packs = computes && !mutates && op.hasTag(at::Tag::pointwise) && base != "clone";
  generator = static_cast<size_t>(schema.argumentIndexWithName("generator").value_or(-1));
  draws_from_default = op.hasTag(at::Tag::nondeterministic_seeded) && generator >= arguments;
  if (base.back() == '_' && base[0] != '_') {
    base.pop_back();  // in place
  }
  lacks_int64 = operators_without_int64().count(base) != 0;
  warns = base == "index_select";
  const bool takes_numbers = operators_of_numbers().count(base) != 0;
  for (const auto& argument : schema.arguments()) {
    const auto type = argument.type()->cast<c10::OptionalType>();
    const auto kind = (type ? type->getElementType() : argument.type())->kind();
    is_operand.push_back(takes_numbers && kind == c10::TypeKind::NumberType);
  }
}

void Kernel::run_on_host(Stack& stack) const {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const LentGenerator lent(draws_from_default);
  if (arrange != nullptr) {
    arrange(stack);
    host.callBoxed(stack);
  } else {
    host.callBoxedForDispatchKey(c10::DispatchKey::CPU, stack);
  }
  for (size_t i = stack.size() - results; packs && i < stack.size(); ++i) {
    if (stack[i].isTensor() && stack[i].toTensor().defined() && stack[i].toTensor().layout() == c10::kStrided) {
      stack[i] = stack[i].toTensor().contiguous();
    }
  }
}

void Kernel::operator()(const c10::OperatorHandle&, c10::DispatchKeySet, Stack* stack) const {
  const size_t first = stack->size() - arguments;
  const bool sends = copies && !on_device((*stack)[first].toTensor());
  const bool fetches = copies && !on_device((*stack)[first + 1].toTensor());
  const bool computes_now = computes && !sends && !fetches;
  TORCH_CHECK(error_of_operators.empty() || !computes_now, error_of_operators);
  Signature signature(hash);
  Call call(computes_now ? &signature : nullptr);
  for (size_t i = 0; i < arguments; ++i) {
    call.to_host((*stack)[first + i], i == generator, is_operand[i]);
  }

  const bool reads_now = fetches || (reads && !(repeats && !stack->back().isNone())) || (indexes && call.has_mask());
  if (reads_now && is_recording()) {
    refuse(*this, "reads values of the device on the host inside a recording", "read them before or after it");
  }
  // The bridge's cpu_fallback.cpp: it copies the operands to the host and the results back.
  const bool falls_back = lacks_int64 && call.is_of_int64();
  TORCH_CHECK(
      !(falls_back && is_recording()),
      line_text(current_line()), ": ", name, " of int64: cpu fallback is not supported during hpu graph capturing");
  if (warns && is_recording()) {
    TORCH_WARN("operations used in HPU graphs might result in accuracy issues : index_select");
  }
  if (call.mixed() && !copies) {
    count_mixed();
    if (is_strict()) {
      refuse(*this, "mixes tensors of the device and of the host", "move them all to hpu");
    }
  }
  if (is_strict() && reads_now) {
    refuse(*this, "reads values of the device on the host inside a step", "keep them in tensors until the step ends");
  }
  if (is_strict() && falls_back) {
    refuse(*this, "has no kernel for int64 and runs on the host inside a step", "use another dtype or operator");
  }
  if (is_strict() && computes_now && call.has_float64()) {
    refuse(*this, "computes in float64, which a Gaudi has not", "use float32");
  }
  if (computes_now && !falls_back) {
    add_operator(signature, [&] { return form_of(*this, *stack); });
  }

  const bool recorded = computes_now && is_recording();
  const Stack inputs = recorded ? Stack(stack->end() - static_cast<std::ptrdiff_t>(arguments), stack->end()) : Stack();
  run_on_host(*stack);
  if (recorded) {
    record(*this, inputs, Stack(stack->end() - static_cast<std::ptrdiff_t>(results), stack->end()));
  }

  if (mutates || copies) {
    call.follow();
  }
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    (*stack)[i] = call.to_device(std::move((*stack)[i]));
  }
  if ((reads_now || falls_back) && (is_in_step() || operators_wait())) {
    host_read(name, current_line());
  }
}

}  // namespace gaudi_sim
