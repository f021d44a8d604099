// Spheres that mirror each other on a checkered plane, and a glass one before them.
#version 3.7;
global_settings { assumed_gamma 1.0 max_trace_level 6 }
camera { location <0, 2.5, -7> look_at <0, 1, 0> angle 45 }
light_source { <6, 9, -6> color rgb 1 }
light_source { <-5, 4, -3> color rgb 0.4 }
sky_sphere { pigment { gradient y color_map { [0 rgb <0.8, 0.85, 1>] [1 rgb <0.2, 0.3, 0.7>] } } }
plane { y, 0 pigment { checker color rgb 0.9 color rgb 0.15 } finish { reflection 0.2 } }
#declare I = 0;
#while (I < 9)
  sphere { <2 * sin(I * 0.698), 0.5 + mod(I, 3) * 0.6, 2 * cos(I * 0.698)>, 0.5
    pigment { color rgb <mod(I, 2), mod(I, 3) / 2, mod(I, 5) / 4> } finish { phong 0.8 reflection 0.35 } }
  #declare I = I + 1;
#end
sphere { <0.6, 0.7, -3>, 0.6 pigment { color rgbf <0.9, 1, 0.95, 0.9> } interior { ior 1.5 } finish { phong 1 reflection 0.1 } }
torus { 1.2, 0.25 translate <0, 1.2, 0> pigment { color rgb <0.9, 0.6, 0.1> } finish { phong 0.6 reflection 0.3 } }
