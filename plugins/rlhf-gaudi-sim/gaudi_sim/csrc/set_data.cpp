// Tensors of Gaudi's bridge are of another type than the host's: torch refuses `parameter.data = ` between the two
// ("incompatible tensor type", github.com/soumyarani/verl-gaudi, docs/02 and 03; the bridge's core/weight_sharing.py:
// "changing parameters data tensors in HPU is impossible"), and nn.Module.to makes new parameters.

#include "set_data.h"

#include <ATen/core/VariableHooksInterface.h>
#include <torch/library.h>

#include "device.h"

namespace gaudi_sim {
namespace {

using Hooks = at::impl::VariableHooksInterface;

bool refused = false;

bool differs(const at::TensorBase& one, const at::TensorBase& other) {
  return one.device().type() != other.device().type() &&
      (one.device().type() == c10::DeviceType::HPU || other.device().type() == c10::DeviceType::HPU);
}

// torch's own, but for `set_data`.
struct OwnHooks final : Hooks {
  explicit OwnHooks(const Hooks* torchs) : torchs(torchs) {}

  void set_data(const at::TensorBase& self, const at::TensorBase& data) const override {
    TORCH_CHECK(
        !differs(self, data),
        "Attempted to call `variable.set_data(tensor)`, but `variable` and `tensor` have incompatible tensor type.");
    torchs->set_data(self, data);
  }

  at::TensorBase tensor_data(const at::TensorBase& self) const override {
    return torchs->tensor_data(self);
  }
  at::TensorBase variable_data(const at::TensorBase& self) const override {
    return torchs->variable_data(self);
  }
  const c10::intrusive_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& self) const override {
    return torchs->grad_fn(self);
  }
  unsigned _register_hook(const at::TensorBase& self, std::function<at::TensorBase(const at::TensorBase&)> hook)
      const override {
    return torchs->_register_hook(self, std::move(hook));
  }
  void remove_hook(const at::TensorBase& self, unsigned place) const override {
    torchs->remove_hook(self, place);
  }
  bool is_view(const at::TensorBase& self) const override {
    return torchs->is_view(self);
  }
  const at::TensorBase& base(const at::TensorBase& self) const override {
    return torchs->base(self);
  }
  const std::string& name(const at::TensorBase& self) const override {
    return torchs->name(self);
  }
  bool is_leaf(const at::TensorBase& self) const override {
    return torchs->is_leaf(self);
  }
  int64_t output_nr(const at::TensorBase& self) const override {
    return torchs->output_nr(self);
  }
  at::TensorBase data(const at::TensorBase& self) const override {
    return torchs->data(self);
  }
  int64_t _version(const at::TensorBase& self) const override {
    return torchs->_version(self);
  }
  void retain_grad(const at::TensorBase& self) const override {
    torchs->retain_grad(self);
  }
  bool retains_grad(const at::TensorBase& self) const override {
    return torchs->retains_grad(self);
  }
  void _backward(
      const at::Tensor& self,
      at::TensorList inputs,
      const std::optional<at::Tensor>& gradient,
      std::optional<bool> keep_graph,
      bool create_graph) const override {
    torchs->_backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& self, bool requires_grad) const override {
    torchs->requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(
      const c10::OperatorHandle& op,
      c10::DispatchKeySet keys,
      torch::jit::Stack* stack) const override {
    torchs->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& self) const override {
    return torchs->grad_dtype(self);
  }
  void set_grad_dtype(const at::TensorBase& self, const std::optional<c10::ScalarType>& dtype) const override {
    torchs->set_grad_dtype(self, dtype);
  }

  const Hooks* torchs;
};

// nn.Module.to asks this before it chooses between `.data = ` and a new parameter.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  return !(refused && differs(self, from)) &&
      self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

}  // namespace

void refuse_set_data() {
  if (!refused) {
    refused = true;
    at::impl::SetVariableHooks(new OwnHooks(at::impl::GetVariableHooks()));  // kept for the life of the process
  }
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
}

}  // namespace gaudi_sim
