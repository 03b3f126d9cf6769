r"""All steps of a path as one operation: a linear process that a network pushes.

Forward, for the noise :math:`\varepsilon` of N steps,

.. math::

    (u_i, \log c_i, l_i) = \mathrm{mask}_i \cdot \mathrm{control}_i(z_i), \qquad
    z_{i+1} = \mathrm{shift}_i + \mathrm{decay}_i z_i + \mathrm{gain}_i u_i
        + \mathrm{scale}_i C_i \varepsilon_i + dt_i f_i(z_i)

where gain is scale times sqrt(dt); C has the diagonal c and below it the entries l, which are zero
if C is diagonal, and is the identity without contraction; and f, a network in the drift of the
process, may be missing. The outputs are the states and what the log ratio is made of: the sums over
the state of u^2 and of u eps, or with contraction the outputs of the control themselves.

It keeps the states, the noise, the values of the hidden layers, and the outputs of the control
unless they are cheaply made again from few units.

Backward, with :math:`g_{i+1}` the gradient with respect to :math:`z_{i+1}` and :math:`a_i` the one
that the outputs :math:`o_i = (u_i, \log c_i, l_i)` have from the log ratio, every output k of
which moves one entry r(k) of the state by a factor :math:`\phi_k`,

.. math::

    \phi_i = (\mathrm{gain}_{i,r},\; \mathrm{scale}_{i,r} c_{i,r} \varepsilon_{i,r},\;
        \mathrm{scale}_{i,r} \varepsilon_{i,s}), \qquad
    \delta_{i,k} = \mathrm{mask}_i (a_{i,k} + \phi_{i,k}\, g_{i+1,r(k)}), \qquad
    g_i = \mathrm{decay}_i g_{i+1} + J_i^T \delta_i + dt_i F_i^T g_{i+1}
        + \frac{\partial L}{\partial z_i}

with (r, s) the row and the column of an entry of l, and J and F the Jacobians of control and f with
respect to the state, applied layer by layer from the values of the hidden layers. The gradient with
respect to a weight is the sum over all steps of delta times the layer's input, one matrix product
for a block of steps. Second derivatives are those of the same formulas in ordinary operations
(:func:`~pyro_sde._ops.fused.forward.plain_path`).
"""

from .contraction import Triangle, contracted, split_outputs
from .forward import fused_path
from .inputs import Inputs, Layout, Net, NetLayout, Outputs
from .stopped import stopped_ratio

__all__ = [
    "Inputs",
    "Layout",
    "Net",
    "NetLayout",
    "Outputs",
    "Triangle",
    "contracted",
    "fused_path",
    "split_outputs",
    "stopped_ratio",
]
