r"""All steps of a path as one operation: a linear process that a network pushes.

Forward, for the noise :math:`\varepsilon` of N steps,

.. math::

    (u_i, \log c_i) = \mathrm{mask}_i \cdot \mathrm{control}_i(z_i), \qquad
    z_{i+1} = \mathrm{shift}_i + \mathrm{decay}_i z_i + \mathrm{gain}_i u_i
        + \mathrm{scale}_i c_i \varepsilon_i + dt_i f_i(z_i)

where gain is scale times sqrt(dt), c = 1 without contraction, and f, a network in the drift of the
process, may be missing. The outputs are the states and what the log ratio is made of: the sums
over the state of u^2 and of u eps, or u and log c themselves with contraction.

It keeps the states, the noise, the values of the hidden layers, and the outputs of the control
unless they are cheaply made again from few units.

Backward, with :math:`g_{i+1}` the gradient with respect to :math:`z_{i+1}` and :math:`a_i` the one
that the outputs :math:`o_i = (u_i, \log c_i)` have from the log ratio,

.. math::

    \delta_i = \mathrm{mask}_i (a_i + (\mathrm{gain}_i, \mathrm{scale}_i c_i \varepsilon_i)
        g_{i+1}), \qquad
    g_i = \mathrm{decay}_i g_{i+1} + J_i^T \delta_i + dt_i F_i^T g_{i+1}
        + \frac{\partial L}{\partial z_i}

with J and F the Jacobians of control and f with respect to the state, applied layer by layer from
the values of the hidden layers. The gradient with respect to a weight is the sum over all steps of
delta times the layer's input, one matrix product for a block of steps. Second derivatives are those
of the same formulas in ordinary operations (:func:`~pyro_sde._ops.fused.forward.plain_path`).
"""

from .forward import fused_path
from .inputs import Inputs, Layout, Net, NetLayout, Outputs

__all__ = ["Inputs", "Layout", "Net", "NetLayout", "Outputs", "fused_path"]
