// The JSON schema of each of Java's types by victools' generator: mvn compile exec:java -Dexec.mainClass=Main
import com.fasterxml.jackson.annotation.*;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.github.victools.jsonschema.generator.*;
import com.github.victools.jsonschema.module.jackson.*;
import com.github.victools.jsonschema.module.jakarta.validation.*;
import jakarta.validation.constraints.*;
import java.math.*;
import java.net.*;
import java.time.*;
import java.util.*;

public class Main {
    public enum Color { RED, GREEN }
    public record Text(String a) {}
    public record Numbers(int a, long b, Long c, double d, float e, BigDecimal f, BigInteger g, short h, byte i) {}
    public record Flags(boolean a, Boolean b) {}
    public record Enums(Color a) {}
    public record Lists(List<String> a, int[] b, Set<String> c, Set<Color> d) {}
    public record Maps(Map<String, Integer> a, Map<Color, String> b) {}
    public record Optionals(Optional<String> a) {}
    public record Times(LocalDate a, LocalDateTime b, LocalTime c, Instant d, OffsetDateTime e, ZonedDateTime f, Duration g, Period h) {}
    public record Others(UUID a, URI b, URL c, Object d) {}
    public record Nested(Text a, List<Text> b) {}
    public record Node(int value, Node next, List<Node> nodes) {}
    public record Limits(@NotNull @Size(min = 1, max = 9) String a, @Min(0) @Max(9) int b, @Positive double c, @DecimalMin(value = "0", inclusive = false) @DecimalMax("0.5") BigDecimal d,
        @Pattern(regexp = "^[a-c]+$") String e, @Email String f, @NotEmpty List<String> g, @NotBlank String h, @Negative int i) {}
    @JsonTypeInfo(use = JsonTypeInfo.Id.NAME, property = "type")
    @JsonSubTypes({@JsonSubTypes.Type(value = Circle.class, name = "circle"), @JsonSubTypes.Type(value = Square.class, name = "square")})
    public interface Shape {}
    public record Circle(double radius) implements Shape {}
    public record Square(double side) implements Shape {}
    public record Shapes(Shape a, List<Shape> b) {}

    public static void main(String[] args) throws Exception {
        var builder = new SchemaGeneratorConfigBuilder(SchemaVersion.DRAFT_2020_12, OptionPreset.PLAIN_JSON)
            .with(new JacksonModule(JacksonOption.RESPECT_JSONPROPERTY_REQUIRED))
            .with(new JakartaValidationModule(JakartaValidationOption.INCLUDE_PATTERN_EXPRESSIONS, JakartaValidationOption.NOT_NULLABLE_FIELD_IS_REQUIRED))
            .with(Option.EXTRA_OPEN_API_FORMAT_VALUES).with(Option.STANDARD_FORMATS);
        var generator = new SchemaGenerator(builder.build());
        var emitted = new LinkedHashMap<String, Object>();
        for (Class<?> each : List.of(Text.class, Numbers.class, Flags.class, Enums.class, Lists.class, Maps.class, Optionals.class, Times.class, Others.class, Nested.class, Node.class, Limits.class, Shapes.class))
            emitted.put(each.getSimpleName(), generator.generateSchema(each));
        System.out.println(new ObjectMapper().writerWithDefaultPrettyPrinter().writeValueAsString(emitted));
    }
}
