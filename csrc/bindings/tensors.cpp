// Facts of many tensors of torch's at a time, by its exchange functions for DLPack
// (Tensor.__dlpack_c_exchange_api__): one call takes 55 ns for what four attributes read in Python
// take 250 ns. Where tensors are small, a step of an optimizer mostly waits for the memory in which
// these facts lie, so what later tensors need is prefetched.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "bindings/bindings.h"

namespace vlmk {
namespace {

// DLTensor and DLPackExchangeAPI of dlpack.h, version 1.2 (https://github.com/dmlc/dlpack); only
// what a later minor version may add is behind them.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  const void *previous, *allocate, *export_managed, *import_managed;
  int (*read)(void* object, DlTensor* tensor);  // 0, or -1 and a Python error
};
constexpr uint8_t kFloat = 2, kBfloat = 4;  // DLDataTypeCode
constexpr int32_t kHost = 1;                // kDLCPU

bool is_known(const py::capsule& capsule) {
  const auto* exchange = capsule.get_pointer<const DlExchange>();
  return exchange->major == 1 && exchange->minor >= 2 && exchange->read != nullptr;
}

const DlExchange& exchange_of(const py::capsule& capsule) {
  if (!is_known(capsule)) throw std::invalid_argument("exchange is not of DLPack 1.2 or a later 1");
  return *capsule.get_pointer<const DlExchange>();
}

// All zero for a tensor without memory of its own, such as a sparse one.
DlTensor read(const DlExchange& exchange, py::handle object) {
  DlTensor x{};
  if (exchange.read(object.ptr(), &x) == 0) return x;
  PyErr_Clear();
  return {};
}

int64_t address_of(const DlTensor& x) {
  return reinterpret_cast<int64_t>(x.data) + static_cast<int64_t>(x.byte_offset);
}

bool is_empty(const DlTensor& x) { return std::count(x.shape, x.shape + x.ndim, 0) > 0; }

// What two forms have in common if they are equal, but for shape and strides.
struct Form {
  int64_t address, device, type, dims;
  explicit Form(const DlTensor& x)
      : address(address_of(x)),
        device(x.device_type | static_cast<int64_t>(x.device_id) << 32),
        type(x.code | x.bits << 8 | x.lanes << 16),
        dims(x.ndim) {}
};

// ---- fetching ahead -----------------------------------------------------------------------------

// GCC takes a function that does nothing but prefetch for one without effects, and drops the call.
#define VLMK_FETCH inline __attribute__((always_inline)) void

PyObject* at(const py::list& objects, size_t i) {
  return PyList_GET_ITEM(objects.ptr(), static_cast<Py_ssize_t>(i));
}

// The object of a place in a list, or null behind its end.
PyObject* later(const py::list& objects, size_t i) {
  return static_cast<Py_ssize_t>(i) < PyList_GET_SIZE(objects.ptr()) ? at(objects, i) : nullptr;
}

// Wrong addresses do no harm, but a null one would be a look-up for nothing.
VLMK_FETCH fetch(const void* from, int lines = 1) {
  if (reinterpret_cast<uintptr_t>(from) < 4096) return;
  for (int i = 0; i < lines; ++i) __builtin_prefetch(static_cast<const char*>(from) + 64 * i);
}

// Where torch's tensors have the address of their TensorImpl.
struct Layout {
  PyTypeObject* tensor = nullptr;  // torch.Tensor
  size_t offset = 0;               // bytes in the object; 0: not found
} layout;

// Finds it by one tensor, whose TensorImpl is at `impl`.
void learn_layout(py::handle tensor, uintptr_t impl) {
  layout.tensor = Py_TYPE(tensor.ptr());
  const auto size = static_cast<size_t>(layout.tensor->tp_basicsize);
  for (size_t at = sizeof(PyObject); at + sizeof(impl) <= size; at += sizeof(impl)) {
    if (std::memcmp(reinterpret_cast<const char*>(tensor.ptr()) + at, &impl, sizeof(impl)) == 0) {
      layout.offset = at;
      return;
    }
  }
}

const char* impl_of(PyObject* object) {
  if (object == nullptr || layout.offset == 0 || !PyObject_TypeCheck(object, layout.tensor)) {
    return nullptr;
  }
  const char* impl;
  std::memcpy(&impl, reinterpret_cast<const char*>(object) + layout.offset, sizeof(impl));
  return impl;
}

constexpr size_t kObject = 16, kImpl = 10, kParts = 6;  // places ahead

// Of tensors behind place i of a list: the object, then its TensorImpl (200 bytes), then what that
// has the addresses of behind its first 16 bytes: StorageImpl, AutogradMeta, and the version.
VLMK_FETCH fetch_tensors(const py::list& tensors, size_t i) {
  fetch(later(tensors, i + kObject));
  fetch(impl_of(later(tensors, i + kImpl)), 4);
  const char* parts[4] = {};
  if (const char* impl = impl_of(later(tensors, i + kParts))) {
    std::memcpy(parts, impl + 16, sizeof(parts));
  }
  for (const char* part : parts) fetch(part);
}

// Of dicts behind place i of a list: the object, then its keys.
VLMK_FETCH fetch_dicts(const py::list& dicts, size_t i) {
  fetch(later(dicts, i + kObject));
  PyObject* const dict = later(dicts, i + kImpl);
  if (dict && PyDict_Check(dict)) fetch(reinterpret_cast<PyDictObject*>(dict)->ma_keys, 3);
}

// ---- what was checked ---------------------------------------------------------------------------

// Address, device, type, shape and strides of each tensor, to be compared with those of another
// time.
py::bytes forms(const py::capsule& capsule, const py::list& tensors) {
  const DlExchange& exchange = exchange_of(capsule);
  std::string forms;
  const auto append = [&](const void* numbers, size_t bytes) {
    forms.append(static_cast<const char*>(numbers), bytes);
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_tensors(tensors, i);
    const DlTensor x = read(exchange, at(tensors, i));
    const Form form(x);
    append(&form, sizeof(form));
    append(x.shape, static_cast<size_t>(x.ndim) * 8);
    append(x.strides, static_cast<size_t>(x.ndim) * 8);
  }
  return forms;
}

// Whether each holder, a dict, has its tensor under its key (None: nobody holds it), and the forms
// are these.
bool are_held(const py::capsule& capsule, const py::list& holders, const py::list& keys,
              const py::list& tensors, std::string_view forms) {
  const DlExchange& exchange = exchange_of(capsule);
  if (holders.size() != tensors.size() || keys.size() != tensors.size()) return false;
  const auto next_is = [&](const void* numbers, size_t bytes) {
    if (bytes == 0) return true;
    const bool same = bytes <= forms.size() && std::memcmp(forms.data(), numbers, bytes) == 0;
    if (same) forms.remove_prefix(bytes);
    return same;
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    fetch_tensors(tensors, i);
    fetch_dicts(holders, i);
    PyObject* const holder = at(holders, i);
    if (holder != Py_None) {
      if (!PyDict_Check(holder)) return false;
      PyObject* const held = PyDict_GetItemWithError(holder, at(keys, i));
      if (held == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (held != at(tensors, i)) return false;
    }
    const DlTensor x = read(exchange, at(tensors, i));
    const Form form(x);
    const size_t bytes = static_cast<size_t>(x.ndim) * 8;
    if (!next_is(&form, sizeof(form)) || !next_is(x.shape, bytes) || !next_is(x.strides, bytes)) {
      return false;
    }
  }
  return forms.empty();
}

// ---- gradients ----------------------------------------------------------------------------------

// Parameters that have a gradient, decoupled_grad or else grad, and these.
py::tuple gradients_of(const py::list& params) {
  py::list active, grads;
  const py::str decoupled("decoupled_grad"), usual("grad");
  for (size_t i = 0; i < params.size(); ++i) {
    fetch_tensors(params, i);
    PyObject* const param = at(params, i);
    // Looked up where it would be, as the absence of an attribute is slow to find out.
    const auto own = py::reinterpret_steal<py::dict>(PyObject_GenericGetDict(param, nullptr));
    if (!own) throw py::error_already_set();
    PyObject* const found = PyDict_GetItemWithError(own.ptr(), decoupled.ptr());
    if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
    auto grad = py::reinterpret_borrow<py::object>(found);
    if (!grad || grad.is_none()) {
      grad = py::reinterpret_steal<py::object>(PyObject_GetAttr(param, usual.ptr()));
    }
    if (!grad) throw py::error_already_set();
    if (grad.is_none()) continue;
    active.append(py::handle(param));
    grads.append(grad);
  }
  return py::make_tuple(active, grads);
}

bool is_gradient(const DlTensor& grad, const DlTensor& param) {
  const bool floats = (grad.code == kFloat && grad.bits == 32) ||  //
                      (grad.code == kBfloat && grad.bits == 16);
  return floats && grad.lanes == 1 && grad.device_type == param.device_type &&
         grad.device_id == param.device_id && grad.ndim == param.ndim &&
         std::equal(grad.shape, grad.shape + grad.ndim, param.shape) &&
         (grad.data != nullptr || is_empty(grad));
}

// use(i, param, grad) of each, until one is not of one of the classes, of the shape and device of
// its parameter, float32 or bfloat16, strided, and in memory, or until it returns false.
template <class Use>
bool each_gradient(const DlExchange& exchange, const py::tuple& classes, const py::list& params,
                   const py::list& grads, const Use& use) {
  if (params.size() != grads.size()) return false;
  for (size_t i = 0; i < grads.size(); ++i) {
    fetch_tensors(grads, i);
    fetch_tensors(params, i);
    const auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(at(grads, i)));
    if (std::none_of(classes.begin(), classes.end(), [&](auto x) { return x.ptr() == kind; })) {
      return false;
    }
    const DlTensor param = read(exchange, at(params, i)), grad = read(exchange, at(grads, i));
    if (!is_gradient(grad, param) || !use(i, param, grad)) return false;
  }
  return true;
}

bool are_gradients(const py::capsule& capsule, const py::tuple& classes, const py::list& params,
                   const py::list& grads) {
  const auto any = [](auto...) { return true; };
  return each_gradient(exchange_of(capsule), classes, params, grads, any);
}

// Whether the elements of two tensors of one shape lie in one order.
bool same_order(const DlTensor& a, const DlTensor& b) {
  if (is_empty(a)) return true;
  for (int32_t d = 0; d < a.ndim; ++d) {
    if (a.shape[d] != 1 && a.strides[d] != b.strides[d]) return false;
  }
  return true;
}

bool is_negated(PyObject* tensor, const py::str& is_neg) {
  const auto negated =
      py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(tensor, is_neg.ptr()));
  if (!negated) throw py::error_already_set();
  return negated.ptr() != Py_False;
}

// What `adam_step` takes of each, those with float32 gradients and those with bfloat16 ones, from
// rows without gradients; None unless all are gradients in the order of the parameters' elements,
// with their own sign, and in host memory that is not the parameters'.
py::object adam_rows(const py::capsule& capsule, const py::tuple& classes, const py::list& params,
                     const py::list& grads, const py::list& rows) {
  if (rows.size() != grads.size()) throw std::invalid_argument("rows and grads differ in length");
  std::string found[2];
  found[0].reserve(sizeof(AdamRow) * rows.size());
  const py::str is_neg("is_neg");
  const auto add = [&](size_t i, const DlTensor& param, const DlTensor& grad) {
    fetch(later(rows, i + 8), 2);
    const auto row = py::handle(at(rows, i)).cast<std::string_view>();
    const int64_t address = address_of(grad);
    if (row.size() != sizeof(AdamRow) - sizeof(address)) {
      throw std::invalid_argument("a row has 9 numbers of 8 bytes");
    }
    const bool own = std::memcmp(row.data(), &address, sizeof(address)) != 0 || is_empty(grad);
    if (!own || grad.device_type != kHost || !same_order(grad, param) ||
        is_negated(at(grads, i), is_neg)) {
      return false;
    }
    std::string& into = found[grad.code == kBfloat];
    into += row;
    into.append(reinterpret_cast<const char*>(&address), sizeof(address));
    return true;
  };
  if (!each_gradient(exchange_of(capsule), classes, params, grads, add)) return py::none();
  return py::make_tuple(py::bytes(found[0]), py::bytes(found[1]));
}

}  // namespace

void register_tensors(py::module_& m) {
  m.def("reads_tensors", &is_known, "exchange"_a);
  m.def("learn_layout", &learn_layout, "tensor"_a, "impl"_a);
  m.def("tensor_forms", &forms, "exchange"_a, "tensors"_a);
  m.def("are_held", &are_held, "exchange"_a, "holders"_a, "keys"_a, "tensors"_a, "forms"_a);
  m.def("gradients_of", &gradients_of, "params"_a);
  m.def("are_gradients", &are_gradients, "exchange"_a, "classes"_a, "params"_a, "grads"_a);
  m.def("adam_rows", &adam_rows, "exchange"_a, "classes"_a, "params"_a, "grads"_a, "rows"_a);
}

}  // namespace vlmk
